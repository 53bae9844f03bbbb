"""Whose machine is this, which of its folders outlive it, and when does it stop by itself?

Only what a provider documents stands here; a folder that no row names is not judged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DMI = Path("/sys/class/dmi/id")


@dataclass(frozen=True, slots=True)
class Provider:
    """One place to rent a machine, by its marks."""

    name: str
    variables: tuple[str, ...] = ()
    """Environment variables; one of them is enough."""
    file: str = ""
    """A file that only its machines have."""
    dmi: tuple[str, str] = ("", "")
    """A file of /sys/class/dmi/id, and what it begins with."""
    kept: tuple[str, ...] = ()
    """Folders that outlive a stop."""
    erased: tuple[str, ...] = ()
    """Folders that do not; the deepest folder that is named counts."""
    rule: str = ""
    """What happens to files, and when it stops."""
    stops: bool = False
    """It stops by itself, also in the middle of a run."""


PROVIDERS = (
    # docs.runpod.io/pods/templates/environment-variables, docs.runpod.io/pods/storage
    Provider(
        "RunPod",
        variables=("RUNPOD_POD_ID",),
        kept=("/workspace",),
        erased=("/",),
        rule="stopping a Pod clears its disk except the volume (/workspace unless set otherwise); deleting "
        "it clears that too, unless it is a network volume",
    ),
    # docs.vast.ai/guides/instances/docker-environment, docs.vast.ai/cli/reference/stop-instance
    Provider(
        "Vast.ai",
        variables=("VAST_CONTAINERLABEL",),
        kept=("/",),
        rule="a stopped instance keeps its disk, but may not get its cards back; a destroyed one keeps "
        "nothing",
    ),
    # docs.lambda.ai/public-cloud/filesystems: file systems are mounted there and outlive an instance
    Provider(
        "Lambda",
        file="/lambda/nfs",
        kept=("/lambda/nfs",),
        erased=("/",),
        rule="an instance can only be terminated, which erases all but its file systems in /lambda/nfs",
    ),
    # research.google.com/colaboratory/faq.html
    Provider(
        "Google Colab",
        variables=("COLAB_RELEASE_TAG",),
        kept=("/content/drive",),
        erased=("/",),
        rule="the machine is erased when it is left idle, and after 12 hours at most (longer on paid plans)",
        stops=True,
    ),
    # kaggle.com, product update "Session Persistence for Variables and Files"
    Provider(
        "Kaggle",
        variables=("KAGGLE_KERNEL_RUN_TYPE",),
        kept=("/kaggle/working",),
        erased=("/",),
        rule="sessions have a time limit and end when left idle; /kaggle/working is kept by Save Version, "
        "and in an interactive session only when Persistence is on",
        stops=True,
    ),
    # lightning.ai/docs/sdk/stable/examples/studios: stopping one releases its machine and keeps its files
    Provider(
        "Lightning Studio",
        variables=("LIGHTNING_CLOUD_SPACE_ID",),
        kept=("/teamspace",),
        rule="files below /teamspace stay when the Studio's machine is stopped or switched",
    ),
    # docs.digitalocean.com/products/paperspace/notebooks/details/storage-architecture
    Provider(
        "Paperspace notebook",
        variables=("PAPERSPACE_NOTEBOOK_REPO_ID",),
        kept=("/notebooks", "/storage"),
        erased=("/",),
        rule="only /notebooks and /storage persist; a notebook shuts down after the time it was started for",
        stops=True,
    ),
    # github.com/aws/sagemaker-training-toolkit ENVIRONMENT_VARIABLES.md;
    # docs.aws.amazon.com/sagemaker/latest/dg/model-checkpoints.html
    Provider(
        "SageMaker training job",
        variables=("SM_TRAINING_ENV",),
        kept=("/opt/ml/model", "/opt/ml/output", "/opt/ml/checkpoints"),
        erased=("/",),
        rule="the container is deleted at the end except /opt/ml/model and /opt/ml/output; "
        "/opt/ml/checkpoints is copied to S3 where the job's checkpoint configuration says so",
    ),
    # docs.aws.amazon.com/sagemaker/latest/dg/API_StopNotebookInstance.html: the storage volume is kept;
    # where it is: github.com/aws-samples/amazon-sagemaker-notebook-instance-customization and
    # github.com/aws-samples/sagemaker-studio-apps-lifecycle-config-examples
    Provider(
        "SageMaker notebook",
        file="/opt/ml/metadata/resource-metadata.json",
        kept=("/home/ec2-user/SageMaker", "/home/sagemaker-user"),
        erased=("/",),
        rule="only /home/ec2-user/SageMaker (notebook instance) or /home/sagemaker-user (Studio) outlives "
        "a stop",
    ),
    # docs.databricks.com/files/cwd-dbr-14: storage of the driver is deleted with the cluster
    Provider(
        "Databricks",
        variables=("DATABRICKS_RUNTIME_VERSION",),
        kept=("/Workspace", "/Volumes", "/dbfs"),
        erased=("/",),
        rule="the driver's own disk is deleted when the cluster terminates",
    ),
    # modal.com/docs/guide/environment_variables, /guide/timeouts, /guide/volumes
    Provider(
        "Modal",
        variables=("MODAL_TASK_ID",),
        rule="a function is ended at its timeout (300 seconds unless set, 24 hours at most), and its disk is "
        "lost; a mounted Volume is kept",
        stops=True,
    ),
    # docs.aws.amazon.com/goto/WebAPI/ec2/StopInstances; the mark is the one that cloud-init knows EC2 by, and
    # Deep Learning AMIs mount instance store there
    Provider(
        "Amazon EC2",
        dmi=("sys_vendor", "Amazon EC2"),
        erased=("/opt/dlami/nvme",),
        rule="a stop keeps EBS volumes and erases instance store (/opt/dlami/nvme on Deep Learning AMIs)",
    ),
    # cloud.google.com/ruby/docs/reference/google-cloud-env: how Google's own libraries know it
    Provider("Google Compute Engine", dmi=("product_name", "Google Compute Engine")),
    # learn.microsoft.com/azure/virtual-machines/managed-disks-overview#temporary-disk: /mnt or /mnt/resource;
    # the tag of the chassis is the one that cloud-init knows Azure by
    Provider(
        "Microsoft Azure",
        dmi=("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),
        erased=("/mnt",),
        rule="the temporary disk (/mnt) is lost when the machine is stopped or moved",
    ),
)
"""Those that run inside another one's machines stand before it."""


def find_provider() -> Provider | None:
    """The provider whose marks this machine bears; None: none of them."""
    for provider in PROVIDERS:
        if any(os.environ.get(name) for name in provider.variables):
            return provider
        if provider.file and Path(provider.file).exists():
            return provider
        field, text = provider.dmi
        if field and _line(DMI / field).startswith(text):
            return provider
    return None


def outlives_stop(provider: Provider, folder: Path) -> bool | None:
    """Whether a folder is still there after the machine was stopped; None: not documented."""
    named = {**dict.fromkeys(provider.erased, False), **dict.fromkeys(provider.kept, True)}
    above = [one for one in (folder, *folder.parents) if str(one) in named]
    return named[str(above[0])] if above else None


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
