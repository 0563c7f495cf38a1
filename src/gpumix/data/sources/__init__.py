"""Sources of samples: documents, datasets and streams, indexed or read in turn.

May use all other rooms of `data`; `open_data` chooses the source of a job.
"""
