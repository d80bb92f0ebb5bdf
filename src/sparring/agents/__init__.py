"""Who plays and how: personas, an observation as a prompt, a reply as an action.

``personas`` deals one short persona to each seat; ``agent`` builds the prompt, once, as token ids, and reads the reply
strictly, as one JSON object. A reply that is no action is data (a ``ParseFailure``), never an exception.
"""
