"""Any causal language model of transformers, served by its own forward over blocks of keys and values and states of recurrences."""
