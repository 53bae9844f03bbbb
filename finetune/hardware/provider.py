"""Whose machine is this, which of its folders outlive it, and when does it stop by itself?

Only what a provider documents stands here. What counts of a folder is the file system that it lies on: a
volume that is mounted at or below a folder that is kept, or a disk that is erased. Others are not judged.
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
    """Folders that outlive a stop where a volume is mounted there; `/`: the machine's own disk."""
    erased: tuple[str, ...] = ()
    """Mount points of disks that do not; `/`: the machine's own disk."""
    asked: tuple[str, ...] = ()
    """Folders that outlive it only where that was asked for, as the rule says."""
    advised: str = ""
    """Where runs are put; empty: the first one that is kept."""
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
    # docs.lambda.ai/public-cloud/filesystems: file systems are mounted there and outlive an instance.
    # No other mark of its machines is documented, so one without a file system is not known
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
        advised="/content/drive/MyDrive",
        rule="the machine is erased when it is left idle, and after 12 hours at most (longer on paid plans)",
        stops=True,
    ),
    # kaggle.com, product update "Session Persistence for Variables and Files"
    Provider(
        "Kaggle",
        variables=("KAGGLE_KERNEL_RUN_TYPE",),
        erased=("/",),
        asked=("/kaggle/working",),
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
        kept=("/opt/ml/output/data", "/opt/ml/model"),
        erased=("/",),
        asked=("/opt/ml/checkpoints",),
        rule="the container is deleted at the end; /opt/ml/model and /opt/ml/output/data go to S3 then, and "
        "/opt/ml/checkpoints where the job's checkpoint configuration says so",
    ),
    # docs.aws.amazon.com/sagemaker/latest/dg/API_StopNotebookInstance.html: the storage volume is kept;
    # where it is: github.com/aws-samples/amazon-sagemaker-notebook-instance-customization and, of Studio,
    # github.com/aws-samples/sagemaker-studio-apps-lifecycle-config-examples; Studio is known by the variable
    # that AWS's own toolkit for editors and Studio's image look for
    Provider(
        "SageMaker Studio",
        variables=("SAGEMAKER_APP_TYPE",),
        kept=("/home/sagemaker-user",),
        erased=("/",),
        rule="only /home/sagemaker-user outlives a stop",
    ),
    Provider(
        "SageMaker notebook",
        file="/opt/ml/metadata/resource-metadata.json",
        kept=("/home/ec2-user/SageMaker",),
        erased=("/",),
        rule="only /home/ec2-user/SageMaker outlives a stop",
    ),
    # docs.databricks.com/files/cwd-dbr-14: storage of the driver is deleted with the cluster
    Provider(
        "Databricks",
        variables=("DATABRICKS_RUNTIME_VERSION",),
        kept=("/Volumes", "/Workspace", "/dbfs"),
        erased=("/",),
        rule="the driver's own disk is deleted when the cluster terminates",
    ),
    # modal.com/docs/guide/environment_variables, /guide/timeouts, /guide/volumes
    Provider(
        "Modal",
        variables=("MODAL_TASK_ID",),
        erased=("/",),
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
        erased=("/mnt", "/mnt/resource"),
        rule="the temporary disk (/mnt or /mnt/resource) is lost when the machine is stopped or moved",
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


def outlives_stop(provider: Provider, mount: Path) -> bool | None:
    """Whether what lies on a file system, given by its mount point, is still there after a stop.

    None: not documented, or only where it was asked for. A folder that is kept and that nothing is mounted at
    is a folder of the machine's own disk.
    """
    if any(Path(folder) in (mount, *mount.parents) for folder in provider.kept):
        return True
    return False if str(mount) in provider.erased else None


def only_if_asked(provider: Provider, folder: Path) -> bool:
    """Whether a folder outlives the machine only where its user has asked for that."""
    return any(Path(one) in (folder, *folder.parents) for one in provider.asked)


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
