"""Between an engine and its checkpoints.

`collect` says what a rank has to save, `match` how a checkpoint fits a model, `restore` takes it over, and `Keeper` makes all
ranks do so together. `consolidate` puts whole weights together for other libraries, `load_pretrained` fills models from any
checkpoint. Refuses to know how files look.
"""

from shardwise.persistence.consolidate import consolidate, save_consolidated
from shardwise.persistence.keeper import Keeper, Request
from shardwise.persistence.match import Report
from shardwise.persistence.pretrained import load_pretrained
from shardwise.persistence.restore import Wishes

__all__ = ["Keeper", "Report", "Request", "Wishes", "consolidate", "load_pretrained", "save_consolidated"]
