"""Explains failures between us and a hub, and decides whether the same request may succeed a moment later."""

from __future__ import annotations

import json
import random
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime

import httpx2

from ..errors import AccessError, FloeError, HubError, TryAgainError, UsageError

_TOKENS = "https://huggingface.co/settings/tokens"
_DAY_S = 86400
_MOST_QUOTED = 300  # characters of untrusted text


class BadRedirectError(httpx2.RequestError):
    """A redirect that leads nowhere; its text explains it, in a sentence."""


def is_passing(response: httpx2.Response) -> bool:
    """Whether a status is worth asking again: too many requests, or a server in trouble."""
    return response.status_code in (408, 425, 429) or response.status_code >= 500


def is_expired(response: httpx2.Response, endpoint: str) -> bool:
    """Whether it is the hub's storage that refuses, whose signed addresses soon expire, and not the hub itself."""
    return response.url.origin != httpx2.URL(endpoint).origin and "x-error-code" not in response.headers


def is_broken(error: Exception) -> bool:
    """Whether a request without an answer is worth another try: the connection broke, or nothing came in time."""
    kinds = httpx2.NetworkError | httpx2.RemoteProtocolError | httpx2.TimeoutException | ssl.SSLError | ConnectionError
    return isinstance(error, kinds) and not any(isinstance(e, ssl.SSLCertVerificationError) for e in chain(error))


def is_web_page(response: httpx2.Response) -> bool:
    """Whether something other than the hub answers: no file of a model is a web page."""
    return response.headers.get("content-type", "").startswith("text/html")


def wait_asked(response: httpx2.Response) -> float | None:
    """Seconds after which the server wants to be asked again, 0 to a day; None if it does not say.

    Retry-After in seconds or as a date, else the reset time of the hub's RateLimit header: "api";r=0;t=55.
    """
    value = response.headers.get("retry-after", "").strip()
    if re.fullmatch("[0-9]+", value):
        return _within_a_day(value)
    with suppress(TypeError, ValueError, OverflowError, IndexError, OSError):  # no date, or none of this calendar
        return min(max(0.0, parsedate_to_datetime(value).timestamp() - time.time()), _DAY_S)
    limit = re.search(r";\s*r=0\s*;\s*t=([0-9]+)", response.headers.get("ratelimit", ""))
    return _within_a_day(limit[1]) if limit else None


def _within_a_day(digits: str) -> float:
    return float(min(int(digits), _DAY_S)) if len(digits) < 10 else float(_DAY_S)


def in_words(wait: float) -> str:
    """A wait, 0 to a day, in the largest unit that keeps two digits: "250 seconds"."""
    for name, seconds in (("seconds", 1), ("minutes", 60)):
        if wait < 300 * seconds:
            return f"{wait / seconds:.0f} {name}"
    return f"{wait / 3600:.0f} hours"


def backoff(failures: int, first: float = 0.5, longest: float = 30.0) -> float:
    """Seconds to wait after so many failures in a row: doubled each time, and jittered so that few ask at once."""
    return min(longest, first * 2 ** min(failures - 1, 16)) * random.uniform(0.5, 1.0)


def refusal(response: httpx2.Response, body: bytes, repo: str, endpoint: str, *, token: bool) -> FloeError:
    """The error for a response of the hub whose status is not 2xx.

    Args:
        body: what came with it, if that was short. repo: the model's id. endpoint: the hub's address.
        token: whether the request carried one.
    """
    status, code = response.status_code, response.headers.get("x-error-code", "")
    said, answers = _said(response, body), f"It answers with status {status}."
    if code == "GatedRepo":
        return gated(repo, endpoint, token=token)
    if status == 401 and "invalid credentials" in said.lower():
        return AccessError(
            "The hub does not know this token",
            said,
            f"Make a token with read access at {_TOKENS} and use it (HF_TOKEN, or `hf auth login`).",
        )
    if code == "RevisionNotFound":
        return HubError(f"{repo} has no such revision", said, "Use a branch, a tag or a commit of that repository.")
    if code == "EntryNotFound":
        return HubError(f"{repo} lacks a file that it lists", said, "Try again, or use another revision.")
    if code == "RepoNotFound" or status == 404:
        private = "" if token else " If it is private, set a token (HF_TOKEN, or `hf auth login`)."
        return HubError(
            f"There is no model {repo} on {endpoint}",
            "The hub does not know it, or you may not see it.",
            f"Check the spelling (owner/name, as in the model's address).{private}",
        )
    if status in (401, 403):
        return AccessError(
            f"The hub refuses {repo}",
            said or answers,
            "Check that your token can read this repository." if token else "Set a token (HF_TOKEN, `hf auth login`).",
        )
    if status == 429:
        wait = wait_asked(response)
        return TryAgainError(
            "The hub has had too many requests from here",
            said or "It limits requests per hour.",
            f"Try again in {in_words(wait)}." if wait else "Try again in a few minutes.",
        )
    if is_passing(response):
        return TryAgainError(f"{endpoint} has a problem", said or answers, "Try again later.")
    return HubError(f"{endpoint} does not serve {repo}", said or answers)


def gated(repo: str, endpoint: str, *, token: bool) -> AccessError:
    """The error for a model whose publisher requires its terms to be accepted first."""
    page = f"{endpoint}/{repo}"
    if token:
        return AccessError(
            f"Your account has no access to {repo} yet",
            "Its publisher asks you to accept terms first.",
            f"Accept them at {page} with the account of your token, then try again.",
        )
    return AccessError(
        f"{repo} requires you to accept its terms",
        "The hub needs to know who you are, and no token is set.",
        f"Accept the terms at {page}, make a token at {_TOKENS}, and set it (HF_TOKEN, or `hf auth login`).",
    )


def web_page(endpoint: str) -> TryAgainError:
    """The error for a login page in place of the data."""
    return TryAgainError(
        f"Something else answered instead of {endpoint}",
        "A web page came instead of data, probably the login page of this network (a hotel, a train).",
        "Open any page in a browser, sign in to the network, and try again. If HF_ENDPOINT is set, check its address.",
    )


def no_connection(error: Exception, endpoint: str) -> FloeError:
    """The error for a request that got no answer: one of httpx2's, or of setting up its client."""
    causes = list(chain(error))
    if any(isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in str(cause) for cause in causes):
        return TryAgainError(
            f"The answer does not come from {endpoint}",
            "Its certificate cannot be verified: a login page or a decrypting proxy is in between.",
            "Sign in to the network in a browser. For your company's own certificate, set SSL_CERT_FILE.",
        )
    if isinstance(error, (httpx2.InvalidURL, httpx2.UnsupportedProtocol, ImportError, ValueError)):
        return UsageError(
            f"{endpoint} is not an address that can be used",
            plain(f"{error}"),
            "Check HF_ENDPOINT, HTTP_PROXY, HTTPS_PROXY and ALL_PROXY; proxies must be http:// or https://.",
        )
    if isinstance(error, httpx2.ProxyError):
        return TryAgainError(f"The proxy refuses {endpoint}", plain(f"{error}"), "Check HTTP_PROXY and HTTPS_PROXY.")
    if isinstance(error, BadRedirectError):
        why = f"{error}"
    elif any(isinstance(cause, socket.gaierror) for cause in causes) or isinstance(error, httpx2.ConnectError):
        why = next((c.strerror or str(c) for c in causes if isinstance(c, socket.gaierror)), str(error))
        why = f"{why.rstrip('.') or 'No connection'}."
    elif isinstance(error, httpx2.TimeoutException):
        why = "It does not answer in time."
    else:
        why = "The connection broke."
    return TryAgainError(f"{endpoint} cannot be reached", plain(why), "Check the network connection and try again.")


def plain(text: str) -> str:
    """The beginning of untrusted text, without characters that could control a terminal."""
    return "".join(char if char.isprintable() else " " for char in text[:_MOST_QUOTED])


def _said(response: httpx2.Response, body: bytes) -> str:
    """The server's own words, if it has any."""
    words = response.headers.get("x-error-message", "")
    if not words:
        try:
            words = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""
    return f"The hub says: {plain(words).rstrip('. ')}." if isinstance(words, str) and words.strip() else ""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
