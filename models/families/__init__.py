"""The model families that floe-chat runs, one file each: what distinguishes it from the others, all in one record."""

from __future__ import annotations

from .family import Family
from .mixtral import MIXTRAL
from .olmoe import OLMOE

FAMILIES: dict[str, Family] = {family.model_type: family for family in (MIXTRAL, OLMOE)}
"""By the model_type of config.json."""
