"""The suite of several GPUs: sums over ranks, forwards of a part, serving; under torchrun."""
