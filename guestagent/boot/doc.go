// Package boot is PID 1 of the guest. It mounts the root file system and the writable disk over it,
// switches to that root, and starts the agent. From then on it reaps and supervises. It knows
// nothing of the host's protocol.
//
// The initrd holds this program as /init, the kernel modules, and /etc/coppice/modules: the modules
// in load order, one absolute path per line. /dev/vda is the read-only root (its type is
// coppice.rootfstype= on the kernel's command line, else erofs or ext4, whichever mounts). /dev/vdb
// is the writable disk, an ext4. With coppice.probe=1 the program prints ProbeOK on the console and
// powers off: a host uses this to check whether a hypervisor really runs this kernel.
package boot

// ProbeOK is what a probed kernel says on its console.
const ProbeOK = "COPPICE_PROBE_OK"
