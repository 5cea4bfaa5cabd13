// Package link is a network link whose faults are chosen: delay, jitter, rate,
// a buffer of a certain size, and loss.
//
// Kernels offer this as the netem queueing discipline, which not every one has.
// Here the two ends are TUN devices, one in the caller's network namespace and
// one in a namespace of its own, and a forwarder in this process carries the
// packets between them. TCP is the kernel's on both ends; where the kernel's own
// queueing is meant, Shape puts a token bucket on the far device.
//
// Nothing has a name in the file system: the namespace is held by a descriptor,
// and so are the devices. They vanish with the process, however it ends.
package link
