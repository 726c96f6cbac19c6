"""A client in a separate process, whose CPU time is not counted: python -m benchmarks.generation.client HOST PORT PATH

Each line of standard input is a list of bodies as JSON. They are sent concurrently. The client prints a line with the
answers.
"""

import http.client
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass

_TIMEOUT_S = 300.0


@dataclass
class Streamed:
    """An answer that came as a stream of server-sent events."""

    status: int = 0
    text: str = ""
    tokens: list[int] | None = None
    """llama.cpp's tokens. Servers of OpenAI's protocol send text."""
    first_s: float | None = None
    """Seconds from the request to the first event."""
    pause_s: float = 0.0
    """The longest time between two events."""
    total_s: float = 0.0
    error: str | None = None


def stream(host: str, port: int, path: str, body: object) -> Streamed:
    """Send a request, and read its events to the end."""
    answer, began_s = Streamed(), time.perf_counter()
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer.status, last_s = response.status, time.perf_counter()
        if response.status != http.HTTPStatus.OK:
            answer.error = response.read().decode()
            return answer
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now_s, event = time.perf_counter(), json.loads(line[6:])
            if answer.first_s is None:
                answer.first_s = now_s - began_s
            else:
                answer.pause_s = max(answer.pause_s, now_s - last_s)
            last_s = now_s
            _add(answer, event)
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        answer.total_s = time.perf_counter() - began_s
    return answer


def _add(answer: Streamed, event: dict[str, object]) -> None:
    if "error" in event:
        answer.error = json.dumps(event["error"])
    if isinstance(tokens := event.get("tokens"), list):
        answer.tokens = [*(answer.tokens or []), *tokens]
    if isinstance(text := event.get("content"), str):
        answer.text += text
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        answer.text += choices[0].get("text") or ""


def main() -> None:
    """Send the requests from standard input."""
    host, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    for line in sys.stdin:
        bodies = json.loads(line)
        answers: list[Streamed] = [Streamed()] * len(bodies)

        def send(place: int, body: object, answers: list[Streamed] = answers) -> None:
            answers[place] = stream(host, port, path, body)

        threads = [threading.Thread(target=send, args=item) for item in enumerate(bodies)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps([asdict(answer) for answer in answers]), flush=True)


if __name__ == "__main__":
    main()
