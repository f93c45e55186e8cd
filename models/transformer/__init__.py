"""The paper's Transformers: a language model, and an encoder-decoder."""
