"""What stops a job, in words for the person who started it."""


class JobError(Exception):
    """The job cannot start or go on. Nothing that it wrote is lost; the message says what to do."""
