"""The closed set of errors that the frontend raises; each is one line naming the resource, message or option."""


class FrontendError(Exception):
    """Base of everything that can be wrong with a prompt or with an artifact's frontend resources."""

    exit_code = 1


class TokenizerError(FrontendError):
    """A tokenizer resource is malformed or outside the supported family, or a text or id cannot be converted."""


class ChatTemplateError(FrontendError):
    """The chat template is malformed, uses what its sandbox does not offer, exceeds a limit or rejects the messages."""


class MessagesError(FrontendError):
    """A message list or tool list is malformed."""


class GenerationConfigError(FrontendError):
    """The artifact's generation settings are malformed."""


class OptionError(FrontendError):
    """An option value is out of range or contradicts another option."""

    exit_code = 2
