"""The wizard's questions to the hub: does the model exist, may it be downloaded, and with which token?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from textual import on

from ....models.catalog_entry import CatalogEntry
from ....models.errors import AccessError, FloeError
from ...background import in_background
from ...setup.setups import look_up
from ...setup.wish import Wish
from ...widgets.setup.token import AskingStep, TokenStep
from .wizard_view import WizardView

Back = Callable[[], Awaitable[None]]


class WizardAccess(WizardView):
    """Asks the hub in the background, and the person for a token if the hub wants one."""

    def __init__(self) -> None:
        super().__init__()
        self._token: str | None = None
        self._back: Back | None = None  # from asking the hub
        self._ask_again: Back | None = None

    async def _ask_hub(self, wanted: Wish, then: Callable[[CatalogEntry], Awaitable[None]], back: Back) -> None:
        """Look at the model, with a token if one is needed, then call `then`."""
        asking = AskingStep()
        self._ask_again, self._back = (lambda: self._ask_hub(wanted, then, back)), back
        await self._turn_to(asking)

        def look() -> CatalogEntry | FloeError:
            try:
                return look_up(wanted, self._token)
            except FloeError as error:
                return error

        async def answered(found: CatalogEntry | FloeError) -> None:
            if self._step is not asking:
                return  # the user left this step
            if isinstance(found, AccessError):
                await self._turn_to(TokenStep(found))
            elif isinstance(found, FloeError):
                asking.tell(found)
            else:
                await then(found)

        in_background(self, look, answered)

    @on(TokenStep.Given)
    async def _take_token(self, event: TokenStep.Given) -> None:
        self._token = event.token
        if self._ask_again is not None:
            await self._ask_again()

    @on(AskingStep.Again)
    async def _once_more(self) -> None:
        if self._ask_again is not None:
            await self._ask_again()

    async def _turn_back(self) -> None:
        """Back to the step before the hub was asked."""
        if self._back is not None:
            await self._back()
