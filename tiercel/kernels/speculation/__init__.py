"""Drafting by n-gram search, and verification of drafts, without a host synchronisation.

`ngram_match` searches the text, `ngram_index` an index that grows with it, `hybrid_mtp_ngram`
extends drafts of an MTP head; `verify_accept` decides which drafts stay.
"""
