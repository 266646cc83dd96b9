"""A Ray cluster that does not answer."""

import pytest

from bertkit.errors import UsageError
from bertkit.system.cluster import check_address


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_one_line(address):
    with pytest.raises(UsageError, match=rf"the Ray cluster {address} does not answer \(.*\); correct RAY_ADDRESS"):
        check_address(address)
    check_address("auto")
    check_address("local")
