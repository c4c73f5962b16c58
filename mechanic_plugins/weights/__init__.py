"""How a step goes over the parameters: around any base, or fused with a known one."""
