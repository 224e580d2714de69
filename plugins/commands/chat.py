"""`frame chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import argparse
import sys

from frame.interfaces import Command

from .terminal import INTERRUPTED, TerminalClient, TerminalError, add_client_arguments, show, typed_lines


class ChatCommand(Command):
    """Sends the whole conversation with each question.

    The end of input or ctrl-C at the prompt ends the command; ctrl-C during an answer ends only the answer.
    """

    help = "Chat with a running server."
    examples = (
        "frame chat",
        'frame chat -q "What is the capital of France?"',
        'FRAME_API_KEY=secret frame chat --url http://host:8000 --system-prompt "Answer in French."',
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The server, the system prompt, and the one-shot question."""
        add_client_arguments(parser)
        parser.add_argument("--system-prompt", help="System message that begins the conversation.")
        parser.add_argument("-q", "--quick", metavar="MESSAGE", help="Ask one question, print the answer and exit.")

    def run(self, arguments: argparse.Namespace) -> int:
        """Returns 1 when there is no server or it refuses, 130 when ctrl-C ends the one answer."""
        try:
            client = TerminalClient(arguments)
            messages = [{"role": "system", "content": arguments.system_prompt}] if arguments.system_prompt else []
            if arguments.quick is not None:
                question = {"role": "user", "content": arguments.quick}
                return 0 if show(client.chat([*messages, question]))[1] else INTERRUPTED
            for line in typed_lines(f"Chatting with {client.model}; end of input (ctrl-D) quits."):
                if line.strip():
                    messages.append({"role": "user", "content": line})
                    messages.append({"role": "assistant", "content": show(client.chat(messages))[0]})
            return 0
        except TerminalError as error:
            print(f"frame: {error}", file=sys.stderr)
            return 1
