"""A PostgreSQL server of the tests' own."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg
from sqlalchemy import make_url

from tests.helpers import wait_until

_DEBIAN = Path("/usr/lib/postgresql")
"""Where Debian installs a version's programs, out of everybody's way."""

_IS_AT_REST = """
    SELECT coalesce(bool_and(state = 'idle' AND state_change < now() - interval '0.3 s'), true)
    FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


class PostgresServer:
    """On a socket in its own folder. Not as root, as whom PostgreSQL refuses to run."""

    def __init__(self) -> None:
        self._server, initdb = _program("postgres"), _program("initdb")
        self._folder = Path(tempfile.mkdtemp(prefix="rayloom-pg-"))
        self._user = pwd.getpwnam("nobody").pw_name if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(self._folder, self._user)
        self.url = make_url(f"postgresql+psycopg://studies@/postgres?host={self._folder}")
        options = ["--username", "studies", "--auth", "trust", "--no-sync"]
        command = [initdb, "--pgdata", str(self._folder / "data"), *options]
        subprocess.run(command, check=True, user=self._user, cwd=self._folder, stdout=subprocess.DEVNULL)
        self.start()

    def start(self) -> None:
        """Until it answers."""
        options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self._folder}", "-c", "fsync=off"]
        self._process = subprocess.Popen(
            [self._server, "-D", str(self._folder / "data"), *options],
            user=self._user,
            cwd=self._folder,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)

    def stop(self) -> None:
        """Without waiting for who is connected."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(20)

    def close(self) -> None:
        """Leave nothing behind."""
        self.stop()
        shutil.rmtree(self._folder)

    def add_user(self, name: str, password: str) -> None:
        """Unlike the other user, this one needs its password."""
        rules = self._folder / "data/pg_hba.conf"
        rules.write_text(f"local all {name} scram-sha-256\n{rules.read_text(encoding='utf-8')}", encoding="utf-8")
        with self._connect() as connection:
            connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'".encode())
            connection.execute("SELECT pg_reload_conf()")

    def is_at_rest(self) -> bool:
        """Whether nobody has asked it anything for a moment."""
        with self._connect() as connection:
            (answer,) = connection.execute(_IS_AT_REST).fetchone() or (False,)
        return bool(answer)

    def _answers(self) -> bool:
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(host=str(self._folder), user="studies", dbname="postgres")


def _program(name: str) -> str:
    folders = [os.environ["PATH"], *map(str, sorted(_DEBIAN.glob("*/bin"), reverse=True))]
    found = shutil.which(name, path=os.pathsep.join(folders))
    assert found, f"{name} is not there"
    return found
