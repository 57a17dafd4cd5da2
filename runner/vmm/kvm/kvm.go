// Package kvm has what the drivers of VMMs share about Linux' KVM: its device, who may open it, and
// the CPU that its guests see. It cannot tell whether KVM works: only a guest that has booted under
// it can.
package kvm

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// Device is the device through which a VMM uses KVM.
const Device = "/dev/kvm"

// getAPIVersion is KVM_GET_API_VERSION of linux/kvm.h, and apiVersion its only answer since Linux 2.6.22.
const (
	getAPIVersion = 0xae00
	apiVersion    = 12
)

// Open opens the device and closes it again, to check that this process may open it and that KVM answers. Its error is
// for people.
func Open(device string) error {
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s cannot be opened: %w", device, err)
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written
	version, err := unix.IoctlRetInt(fd, getAPIVersion)
	if err != nil {
		return fmt.Errorf("%s is not the device of KVM: %w", device, err)
	}
	if version != apiVersion {
		return fmt.Errorf("%s has version %d of KVM's interface, not %d", device, version, apiVersion)
	}
	return nil
}

// Group returns the group with which an unprivileged VMM can open the device; none if everybody may open it. It never
// returns the root group, which opens much more.
func Group(device string) ([]uint32, error) {
	var st unix.Stat_t
	if err := unix.Stat(device, &st); err != nil {
		return nil, fmt.Errorf("examine %s: %w", device, err)
	}
	const rw = 0o6
	switch {
	case st.Mode&rw == rw:
		return nil, nil
	case st.Mode>>3&rw == rw && st.Gid != 0:
		return []uint32{st.Gid}, nil
	}
	return nil, core.Errorf(core.FailedPrecondition, core.CodeVMMFailed,
		"only root can open %s, and each VM runs as its own user; cure: groupadd -f kvm && chgrp kvm %[1]s && chmod 0660 %[1]s", device)
}
