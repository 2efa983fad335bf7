"""The ranks of a job: how they are found, meet, agree and share a mesh. No model."""
