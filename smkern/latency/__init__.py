"""How long a step will take: what a launch is made of, and the predictors."""

from smkern.latency.bullet import Bullet
from smkern.latency.correction import Corrected
from smkern.latency.drift import Drift
from smkern.latency.duetserve import DuetServe
from smkern.latency.fitted import load_model, read_model
from smkern.latency.models import MODELS
from smkern.latency.muxwise import MuxWise
from smkern.latency.predictor import Predictor
from smkern.latency.regression import ContentionIgnored, LinearRegression
from smkern.latency.ring import Ring
from smkern.latency.sample import Sample
from smkern.latency.table_predictor import TablePredictor
from smkern.latency.work import Chunk, Size

__all__ = [
    "MODELS",
    "Bullet",
    "Chunk",
    "ContentionIgnored",
    "Corrected",
    "Drift",
    "DuetServe",
    "LinearRegression",
    "MuxWise",
    "Predictor",
    "Ring",
    "Sample",
    "Size",
    "TablePredictor",
    "load_model",
    "read_model",
]
