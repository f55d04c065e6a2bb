"""The tinker wire protocol: converts requests to the pool's commands, and results to wire bytes.

All functions are pure functions on bytes: no HTTP, no database, no model. Every check of a request's content is here,
so that the API and the engine raise the same errors. A check raises UserError, which names the field, its value and the
rule. `tinker.proto` is compiled by `python -m tinkerflow.backend.wire.generate`.
"""

from tinkerflow.backend.wire.custom_losses import CreateCustomLoss as CreateCustomLoss
from tinkerflow.backend.wire.custom_losses import dump_custom_loss as dump_custom_loss
from tinkerflow.backend.wire.custom_losses import load_custom_loss as load_custom_loss
from tinkerflow.backend.wire.custom_losses import read_custom_loss as read_custom_loss
from tinkerflow.backend.wire.forward import decode_forward as decode_forward
from tinkerflow.backend.wire.forward import drift_metrics as drift_metrics
from tinkerflow.backend.wire.forward import encode_forward as encode_forward
from tinkerflow.backend.wire.forward import forward_backward_header as forward_backward_header
from tinkerflow.backend.wire.forward import read_forward as read_forward
from tinkerflow.backend.wire.forward import sampled_tokens as sampled_tokens
from tinkerflow.backend.wire.forward import split_data as split_data
from tinkerflow.backend.wire.forward import training_tokens as training_tokens
from tinkerflow.backend.wire.forward import with_files_to_train as with_files_to_train
from tinkerflow.backend.wire.requests import CopyWeights as CopyWeights
from tinkerflow.backend.wire.requests import CreateModel as CreateModel
from tinkerflow.backend.wire.requests import CustomLossAddress as CustomLossAddress
from tinkerflow.backend.wire.requests import FinishUpload as FinishUpload
from tinkerflow.backend.wire.requests import LoadModel as LoadModel
from tinkerflow.backend.wire.requests import LoadWeights as LoadWeights
from tinkerflow.backend.wire.requests import NumSamples as NumSamples
from tinkerflow.backend.wire.requests import OnModel as OnModel
from tinkerflow.backend.wire.requests import OnNewModel as OnNewModel
from tinkerflow.backend.wire.requests import OnSampler as OnSampler
from tinkerflow.backend.wire.requests import OptimStepBody as OptimStepBody
from tinkerflow.backend.wire.requests import SampleBody as SampleBody
from tinkerflow.backend.wire.requests import SaveExternal as SaveExternal
from tinkerflow.backend.wire.requests import SaveForSampler as SaveForSampler
from tinkerflow.backend.wire.requests import SaveWeights as SaveWeights
from tinkerflow.backend.wire.requests import StartUpload as StartUpload
from tinkerflow.backend.wire.requests import TargetTensor as TargetTensor
from tinkerflow.backend.wire.requests import TtlSeconds as TtlSeconds
from tinkerflow.backend.wire.requests import encode_loaded as encode_loaded
from tinkerflow.backend.wire.requests import encode_model_created as encode_model_created
from tinkerflow.backend.wire.requests import encode_optim_step as encode_optim_step
from tinkerflow.backend.wire.requests import encode_sampler_opened as encode_sampler_opened
from tinkerflow.backend.wire.requests import encode_saved as encode_saved
from tinkerflow.backend.wire.requests import encode_unloaded as encode_unloaded
from tinkerflow.backend.wire.requests import hash_token as hash_token
from tinkerflow.backend.wire.sample import decode_sample as decode_sample
from tinkerflow.backend.wire.sample import encode_sample as encode_sample
from tinkerflow.backend.wire.sample import sample_request as sample_request
from tinkerflow.backend.wire.sample import with_files as with_files
from tinkerflow.backend.wire.sample import with_seed as with_seed
from tinkerflow.backend.wire.validation import WireModel as WireModel
from tinkerflow.backend.wire.validation import parse as parse
