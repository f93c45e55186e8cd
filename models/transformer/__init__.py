"""The paper's Transformers, as a language model and as an encoder with a decoder."""
