"""Upload of an engine's folder, or of a layout for another client, to the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from yaml import YAMLError

from quantizer.config.layouts import LAYOUTS
from quantizer.errors import MissingDependencyError, QuantizerError
from quantizer.utils.files import restore_folder
from quantizer.utils.paths import is_file

_CARD = "README.md"


def push_to_hub(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    api: Any = None,
) -> str:
    """Upload an engine's folder, or one of its layouts, to a repository of the hub, and return its address.

    The repository is created if it is missing. Its page is the model card of the folder. Layouts inside an engine's
    folder are not uploaded with it.

    Example::

        quantizer.push_to_hub("converted/my-model/openvino/sentence-transformers", "me/my-model-int8-openvino")

    Args:
        folder: a folder ``OUT/BACKEND`` of ``quantizer convert``, the folder of a run, or a layout in it.
        repo_id: ``OWNER/NAME``.
        token: a token with write access; None: the one of ``hf auth login`` or of ``HF_TOKEN``.
        private: whether a new repository is private; None: the default of the account.
        api: a ``huggingface_hub.HfApi``; None: a new one with the token.

    Raises:
        QuantizerError: the folder has no model card, or one that the hub would reject; the name of the repository is
            wrong; there is no token; or the hub refused the upload.
        MissingDependencyError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import HfApi, ModelCard, get_token
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ModuleNotFoundError as error:
        raise MissingDependencyError("huggingface_hub", "hf") from error
    path = Path(folder).absolute()
    restore_folder(path)
    if not is_file(path / _CARD):
        raise QuantizerError(
            f"{folder} has no {_CARD}, which is the model card; expected a folder OUT/BACKEND of `quantizer convert`, "
            "the folder of a run, or a layout that --deliver wrote there"
        )
    try:
        _ = ModelCard.load(path / _CARD, ignore_metadata_errors=False).data.to_dict()
    except (ValueError, YAMLError) as error:
        raise QuantizerError(f"{path / _CARD} has metadata that the hub rejects: {error}; correct it") from error
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise QuantizerError(f"repo_id {repo_id!r} is not a repository of the hub; expected OWNER/NAME")
    token = token or get_token()
    if api is None and token is None:
        raise QuantizerError(
            f"no token for the hub: {repo_id} cannot be written without one; run `hf auth login`, set HF_TOKEN, or "
            "pass token=..., from https://huggingface.co/settings/tokens, with write access"
        )
    api = HfApi(token=token) if api is None else api
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        # A folder of an engine may have the name of a layout, such as OUT/openvino.
        is_layout = path.name in LAYOUTS and not any(path.glob("*.engine"))
        inside = [] if is_layout else [f"{name}/**" for name in LAYOUTS]
        api.upload_folder(
            repo_id=repo_id, folder_path=path, ignore_patterns=inside, commit_message=f"Upload {path.name}"
        )
    except (HfHubHTTPError, HFValidationError) as error:
        raise QuantizerError(
            f"the hub refused {repo_id}: {error}; check that the token may write there, or name another repository"
        ) from error
    except OSError as error:
        raise QuantizerError(
            f"the hub cannot be reached for {repo_id}: {error}; check the network, and that HF_HUB_OFFLINE is not set"
        ) from error
    return str(address)
