from tests.measure.fake_cuda import cuda

__all__ = ["cuda"]
