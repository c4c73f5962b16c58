"""What the Transformers and Accelerate plugins share. Registers nothing on import."""
