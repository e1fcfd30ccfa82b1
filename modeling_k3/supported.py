"""Checks the versions when it is imported: first of all by the files through which a hub repository is entered.

Another version of torch or transformers would otherwise be told by whatever name it lacks.
"""

from .versions import check_versions

check_versions()
#: What importing files ask for.
VERSIONS_CHECKED = True
