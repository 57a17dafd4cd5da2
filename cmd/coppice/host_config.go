package main

import (
	"cmp"
	"path/filepath"

	"github.com/coppice-dev/coppice/internal/daemon"
)

// defaultDataDir is where a host keeps images, sandboxes and checkpoints unless told otherwise.
const defaultDataDir = "/var/lib/coppice"

// hostConfig is what the environment says about how VMs run on this host. The flags of servers change it.
func hostConfig(a *app) daemon.HostConfig {
	return daemon.HostConfig{
		Binary: a.getenv("COPPICE_QEMU"), CloudHypervisor: a.getenv("COPPICE_CLOUD_HYPERVISOR"),
		VMM: cmp.Or(a.getenv("COPPICE_VMM"), "auto"), Accelerator: cmp.Or(a.getenv("COPPICE_ACCEL"), "auto"),
	}
}

// imagesDir is where `coppice dev` with the same environment looks for images.
func imagesDir(a *app) string {
	return cmp.Or(a.getenv("COPPICE_IMAGES_DIR"), filepath.Join(cmp.Or(a.getenv("COPPICE_DATA_DIR"), defaultDataDir), "images"))
}
