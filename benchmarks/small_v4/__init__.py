"""A small DeepSeek-V4 with every kind of layer, trained on text in minutes; see `__main__.py`."""
