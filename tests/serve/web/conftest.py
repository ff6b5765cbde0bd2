"""A browser on a page, and what its server and the browser saw."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from tests.serve.web.browser import Session, Watch, opened_session
from tests.serve.web.server import Stage


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with opened_session() as session:
        yield session


@pytest.fixture
def page(session: Session) -> Iterator[Page]:
    with session.fresh() as page:
        yield page


@pytest.fixture
def stage(session: Session) -> Stage:
    return session.stage


@pytest.fixture
def watch(session: Session) -> Watch:
    return session.watch
