"""How the parameters of this package's models are made of Hugging Face's tensors: a module for each family of models."""
