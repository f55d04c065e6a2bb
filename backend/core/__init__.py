"""Small parts that every room uses: errors, ids, time, retries, secrets, files, threads. They import no other room."""
