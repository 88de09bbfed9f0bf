"""The task that every client gets, and the script that solves it.

Owns the words by which the model knows where it is; knows no client and no family of models.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.clients.agents.catalog import Agent, Tools
from tests.clients.model.script import Script, Step

FILE = "fruit.txt"
"""The file that the task is about, in the client's folder."""


@dataclass(frozen=True)
class Task:
    """What the user wants from one client. Its words occur nowhere else."""

    agent: Agent
    folder: Path
    """Where the client works."""

    @property
    def old(self) -> str:
        """The file's content at first."""
        return f"quince-of-{self.agent.name}"

    @property
    def new(self) -> str:
        """Its content in the end."""
        return f"mango-of-{self.agent.name}"

    @property
    def request(self) -> str:
        """The user's first message."""
        return (
            f"Carry out task-of-{self.agent.name}: read {FILE}, put the other fruit in its place "
            "and show the file in capital letters."
        )

    @property
    def question(self) -> str:
        """The user's second message."""
        return f"Now question-of-{self.agent.name}: which fruit is it?"

    @property
    def report(self) -> str:
        """The end of the first answer."""
        return f"The file of {self.agent.name} now says mango."

    @property
    def reply(self) -> str:
        """The answer to the question."""
        return f"It is a mango, {self.agent.name}."

    @property
    def called(self) -> list[str]:
        """The names of the tools that the task takes, in order."""
        return [step.call.name for step in self.steps if step.call]

    @property
    def steps(self) -> list[Step]:
        """What the model answers. It goes on only when it has read what the tools say: the file,
        and its new content in capital letters, which it never writes itself."""
        tools = self.agent.tools
        return [
            *(self._steps_in_text() if tools is None else self._steps_by_calls(tools)),
            self._step(self.new.upper(), self.report, "That is all."),
            self._step(f"question-of-{self.agent.name}", self.reply, "I know that."),
        ]

    def _steps_by_calls(self, tools: Tools) -> list[Step]:
        name, path = self.agent.name, self.folder / FILE
        return [
            Step(
                f"task-of-{name}",
                f"First step-1-of-{name}: I read the file. 🍋",
                tools.read(path),
                "I have to know what the file says.",
            ),
            Step(f"step-1-of-{name}", "What the file says did not reach me."),
            Step(
                self.old,
                "Then I change it.",
                tools.edit(path, self.old, self.new),
                'It is a quince; "mango" fits </better>.',
            ),
            Step(
                # Its own call has this word, also in families that write no text beside a call.
                self.new,
                f"Last step-3-of-{name}: I show it.",
                tools.run(f"tr a-z A-Z < {path}"),
                "Is it changed?",
            ),
            Step(f"step-3-of-{name}", "What the command printed did not reach me."),
        ]

    def _steps_in_text(self) -> list[Step]:
        edit = f"<<<<<<< SEARCH\n{self.old}\n=======\n{self.new}\n>>>>>>> REPLACE"
        text = f"I change it.\n\n{FILE}\n```\n{edit}\n```\n"
        return [self._step(self.old, text, 'It is a quince; "mango" fits </better>.')]

    def _step(self, cue: str, text: str, reasoning: str) -> Step:
        return Step(cue, text, None, reasoning, needs_tools=self.agent.tools is not None)


def script_of(tasks: list[Task]) -> Script:
    """Return a script that solves all of these tasks."""
    return Script([step for task in tasks for step in task.steps])
