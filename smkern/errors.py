"""The errors that smkern raises. A message gives the value, the limit and the remedy."""


class SmkernError(Exception):
    """Base of everything that smkern raises on purpose."""


class BudgetError(SmkernError, ValueError):
    """An SM budget that the device, the stream's partition or the operator cannot serve."""


class ArgumentError(SmkernError, ValueError):
    """Sizes, dtypes, strides or aliasing that an operator cannot serve; nothing was written."""


class DeviceError(SmkernError, RuntimeError):
    """No GPU, a GPU or driver that is too old, or a driver call that failed."""


class PartitionError(SmkernError, RuntimeError):
    """A partition that is closed, still in use, foreign to another, or that cannot be made."""


class ConfinementError(PartitionError):
    """Work ran on SMs outside its partition, or above its budget."""


class TableError(SmkernError, ValueError):
    """A tuned table that is corrupt, half-written, foreign or of another version."""


class ProfileError(SmkernError, ValueError):
    """A device profile that is missing, corrupt or made for another device."""


class LatencyError(SmkernError, ValueError):
    """Measured launches that do not determine a latency model, or a launch that it knows not."""


class WarmupError(SmkernError, RuntimeError):
    """A graph capture needs a kernel variant that was not compiled and loaded before it."""


class OutOfPagesError(SmkernError, RuntimeError):
    """A KV pool has too few pages for a request; it was refused and nothing changed."""


class PoolCorruptError(SmkernError, RuntimeError):
    """The books of a KV pool contradict themselves; found by `check()`."""


class ConfigError(SmkernError, ValueError):
    """A model's configuration that is unknown, incomplete, or that the operators cannot serve."""


class WeightsError(SmkernError, ValueError):
    """A checkpoint with files or tensors that are missing, extra, corrupt or of another shape."""


class RequestError(SmkernError, ValueError):
    """A request that a model cannot serve: its prompt, its length or its sampling values."""


class TraceError(SmkernError, ValueError):
    """A trace with a row that is malformed or out of order, or from which nothing is left."""


class DecisionError(SmkernError, ValueError):
    """A policy's decision that cannot be carried out, or a policy that raised."""


class StalledError(SmkernError, RuntimeError):
    """Work that cannot be launched now, or a device on which nothing has ended for too long."""


class ModelError(SmkernError, RuntimeError):
    """A model that raised while its work was launched; the requests of that launch have failed."""


class EngineDeadError(SmkernError, RuntimeError):
    """A runtime that something stopped midway: its requests have ended, and it takes no more."""


class RankError(SmkernError, RuntimeError):
    """One of several processes that share a model is gone, hangs, or differs; it is named."""
