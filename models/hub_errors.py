"""What went wrong between us and a hub, in words; and whether the same request may succeed a moment later."""

from __future__ import annotations

import json
import random
import re
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from .errors import AccessError, FloeError, HubError, TryAgainError, UsageError

_TOKENS = "https://huggingface.co/settings/tokens"


def is_passing(response: httpx2.Response) -> bool:
    """Whether a status is worth asking again: too many requests, or a server in trouble."""
    return response.status_code in (408, 425, 429) or response.status_code >= 500


def is_web_page(response: httpx2.Response) -> bool:
    """Whether somebody who is not the hub answers: no file of a model is published as a web page."""
    return response.headers.get("content-type", "").startswith("text/html")


def wait_asked(response: httpx2.Response) -> float | None:
    """Seconds after which the server wants to be asked again, if it says so.

    Retry-After in seconds or as a date, else the reset time of the hub's RateLimit header: "api";r=0;t=55.
    """
    value = response.headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        pass
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", response.headers.get("ratelimit", ""))
    return float(limit[1]) if limit else None


def backoff(failures: int, first: float = 0.5, longest: float = 30.0) -> float:
    """Seconds to wait after so many failures in a row: doubled each time, and jittered so that few ask at once."""
    return min(longest, first * 2 ** min(failures - 1, 16)) * random.uniform(0.5, 1.0)


def refusal(response: httpx2.Response, repo: str, endpoint: str, *, token: bool) -> FloeError:
    """The error for a response of the hub whose status is not 2xx.

    Args:
        repo: the model's id. endpoint: the hub's address. token: whether the request carried one.
    """
    status, code = response.status_code, response.headers.get("x-error-code", "")
    said, answers = _said(response), f"It answers with status {status}."
    if code == "GatedRepo":
        return gated(repo, endpoint, token=token)
    if status == 401 and "invalid credentials" in said.lower():
        return AccessError(
            "The hub does not know this token",
            said,
            f"Make a token with read access at {_TOKENS} and give that one (HF_TOKEN, or `hf auth login`).",
        )
    if code == "RevisionNotFound":
        return HubError(f"{repo} has no such revision", said, "Use a branch, a tag or a commit of that repository.")
    if code == "EntryNotFound":
        return HubError(f"{repo} lacks a file that its listing names", said, "Try again, or use another revision.")
    if code == "RepoNotFound" or status == 404:
        private = "" if token else " If it is private, give a token (HF_TOKEN, or `hf auth login`)."
        return HubError(
            f"There is no model {repo} on {endpoint}",
            "The hub does not know it, or does not show it to you.",
            f"Check the spelling: owner/name, as in the model's address.{private}",
        )
    if status in (401, 403):
        return AccessError(
            f"The hub refuses {repo}",
            said or answers,
            "Check that your token may read this repository." if token else "Give a token (HF_TOKEN, `hf auth login`).",
        )
    if status == 429:
        wait = wait_asked(response)
        return TryAgainError(
            "The hub has had too many requests from here",
            said or "It limits how often one may ask.",
            f"Try again in {wait:.0f} seconds." if wait else "Try again in a few minutes.",
        )
    if is_passing(response):
        return TryAgainError(f"{endpoint} is in trouble", said or answers, "Try again later.")
    return HubError(f"{endpoint} does not serve {repo}", said or answers)


def gated(repo: str, endpoint: str, *, token: bool) -> AccessError:
    """The error for a model whose publisher asks to accept terms first."""
    page = f"{endpoint}/{repo}"
    if token:
        return AccessError(
            f"Your account has no access to {repo} yet",
            "Its publisher asks to accept terms first.",
            f"Accept them at {page} with the account of your token, then try again.",
        )
    return AccessError(
        f"{repo} is only for those who accepted its terms",
        "The hub wants to know who asks, and there is no token.",
        f"Accept the terms at {page}, make a token at {_TOKENS}, and give it (HF_TOKEN, or `hf auth login`).",
    )


def web_page(endpoint: str) -> TryAgainError:
    """The error for a login page in place of what was asked for."""
    return TryAgainError(
        f"Something else answers in place of {endpoint}",
        "A web page came where data was asked for, as from the login page of a hotel's or a train's network.",
        "Open any page in a browser, sign in to the network, and try again. If HF_ENDPOINT is set, check its address.",
    )


def no_connection(error: Exception, endpoint: str) -> FloeError:
    """The error for a request that got no answer: one of httpx2's, or of its clients' set-up."""
    causes = list(_chain(error))
    if isinstance(error, (httpx2.InvalidURL, httpx2.UnsupportedProtocol, ImportError, ValueError)):
        return UsageError(
            f"{endpoint} cannot be asked",
            f"{error}",
            "Check HF_ENDPOINT, HTTP_PROXY, HTTPS_PROXY and ALL_PROXY; proxies must be http:// or https://.",
        )
    if any(isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in str(cause) for cause in causes):
        return TryAgainError(
            f"The answer does not come from {endpoint}",
            "Its certificate cannot be verified: a network's login page or a proxy that decrypts is in between.",
            "Sign in to the network in a browser. For your company's own certificate, set SSL_CERT_FILE.",
        )
    if isinstance(error, httpx2.ProxyError):
        return TryAgainError("The proxy does not let us through", f"{error}", "Check HTTP_PROXY and HTTPS_PROXY.")
    if any(isinstance(cause, socket.gaierror) for cause in causes) or isinstance(error, httpx2.ConnectError):
        why = next((str(c) for c in causes if isinstance(c, socket.gaierror)), str(error)) or "No connection."
    elif isinstance(error, httpx2.TimeoutException):
        why = "It does not answer in time."
    else:
        why = "The connection broke."
    return TryAgainError(f"{endpoint} cannot be reached", why, "Check the network connection and try again.")


def plain(text: str) -> str:
    """The beginning of somebody else's text, without characters that could drive a terminal."""
    return "".join(char if char.isprintable() else " " for char in text[:300])


def _said(response: httpx2.Response) -> str:
    """The server's own words, if it has any and they are short; its body must have been read."""
    words = response.headers.get("x-error-message", "")
    if not words and not response.is_stream_consumed:
        return ""
    try:
        fields: Any = {} if words else json.loads(response.content)
        words = words or str(fields.get("error", ""))
    except (ValueError, AttributeError, RecursionError, httpx2.StreamError):
        return ""
    return f"The hub says: {plain(words).rstrip('. ')}." if words else ""


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
