// Package boot is PID 1 of the guest: it mounts the root file system and the writable disk over it, switches to that root, starts
// the agent, and from then on reaps and supervises. It knows nothing of the host's protocol.
//
// The initrd holds this program as /init, the kernel modules to load in order, one absolute path a line, in
// /etc/coppice/modules, and the modules. /dev/vda is the read-only root (the type is coppice.rootfstype= of the kernel's
// command line, else erofs or ext4, whichever mounts), /dev/vdb the writable disk, an ext4. coppice.probe=1 makes it say
// ProbeOK on the console and power off: a host uses that to find out whether a hypervisor really runs this kernel.
package boot

// ProbeOK is what a probed kernel says on its console.
const ProbeOK = "COPPICE_PROBE_OK"
