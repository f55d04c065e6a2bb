"""The table “What ran where”, on the front page of the repository and of the site."""

HEAD = ("where", "executed", "what is checked, and by whom")
ROWS = [
    ("Linux on x86-64 CPUs, one machine", "**yes**", "all of it, by CI: `tests/e2e` starts the service as a user does"),
    (
        "small models with random weights",
        "**yes**",
        "each kind of layer by CI, every family by hand, against transformers and PEFT: `tests/compute/test_parity.py`",
    ),
    ("pretrained weights", "no", "sizes and memory are computed from the configurations of real models"),
    (
        "NVIDIA GPUs",
        "**no**",
        "CI compiles programs of real models with NVIDIA's compiler, mostly for the H100: `tests/accelerators`; "
        "it interprets some kernels on CPUs",
    ),
    ("TPUs", "**no**", "the same with Google's compiler, for the v6e"),
    ("several machines", "no", "network namespaces of one machine, with lost hosts and slow links, by CI"),
    (
        "Ray, Slurm",
        "on one machine",
        "clusters without accelerators, with killed workers: `tests/e2e/test_ray.py`, `tests/e2e/test_slurm.py`",
    ),
    (
        "Kubernetes",
        "no cluster",
        "CI renders the manifests and checks them against the schemas; a thorough test executes the pods' commands: "
        "`tests/e2e/test_kubernetes.py`",
    ),
    (
        "container images",
        "for CPUs, once",
        "built and run by hand with buildah; those for GPUs and TPUs were never built",
    ),
    ("Postgres", "**yes**", "a real server, by CI"),
    ("Google Cloud Storage", "no", "a stand-in for its API: `tests/store/fake_gcs.py`"),
    ("SkyPilot, clouds", "no", "SkyPilot's own reader accepts the task"),
    ("macOS, Windows, ARM", "no", "nothing"),
]
