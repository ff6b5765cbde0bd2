"""Text and tokens: tokenizers, chat templates, streaming detokenization, stop strings.

What strangers wrote (templates, tokenizer files) runs in child processes. Free of PyTorch.
"""
