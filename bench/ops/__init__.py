"""The operator suite: a layer's other operators against torch's sequences and FlashInfer."""
