"""From text to token ids and back: tokenizer, chat template, sampling parameters, stop rules, output parsing.

Everything that this package reads (tokenizer, template, generation settings, messages) is untrusted data.
"""
