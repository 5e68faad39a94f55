"""What a test notes in its module."""


class Record(list):
    """What happened, which a try that failed does not take back: it cannot be pickled."""

    def __reduce_ex__(self, protocol):
        raise TypeError("this record stays as it is")

    def __deepcopy__(self, memo):
        return type(self)(self)
