"""Device code that several GPUs of one host run together, and the memory that they share for it."""
