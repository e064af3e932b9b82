"""How long a step will take: what a launch is made of, and the predictors."""

from smkern.latency.correction import Corrected
from smkern.latency.predictor import Predictor
from smkern.latency.table_predictor import TablePredictor
from smkern.latency.work import Chunk, Size

__all__ = ["Chunk", "Corrected", "Predictor", "Size", "TablePredictor"]
