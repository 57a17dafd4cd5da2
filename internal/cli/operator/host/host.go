// Package host has the commands that check and maintain this host: its abilities, its images, what its runner keeps.
package host

import (
	"cmp"
	"path/filepath"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/daemon"
)

// DefaultDataDir is the default directory for the images, sandboxes and checkpoints of a host.
const DefaultDataDir = "/var/lib/coppice"

// Config has the settings of the environment for VMs on this host. The flags of servers change it.
func Config(a *cli.App) daemon.HostConfig {
	return daemon.HostConfig{
		Binary: a.Getenv("COPPICE_QEMU"), CloudHypervisor: a.Getenv("COPPICE_CLOUD_HYPERVISOR"),
		VMM: cmp.Or(a.Getenv("COPPICE_VMM"), "auto"), Accelerator: cmp.Or(a.Getenv("COPPICE_ACCEL"), "auto"),
	}
}

// imagesDir is where `coppice dev` with the same environment looks for images.
func imagesDir(a *cli.App) string {
	return cmp.Or(a.Getenv("COPPICE_IMAGES_DIR"), filepath.Join(cmp.Or(a.Getenv("COPPICE_DATA_DIR"), DefaultDataDir), "images"))
}
