//go:build linux

package link

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// device is a TUN device: what its namespace sends to it is read, and what is
// written to it arrives there.
type device struct {
	fd   int
	name string
}

// newDevice makes one in the present thread's namespace. A %d in the name is
// replaced by the first number that is free.
func newDevice(name string) (*device, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun (needs root, and a kernel with CONFIG_TUN): %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("TUN device %s: %w", name, err), unix.Close(fd))
	}
	return &device{fd: fd, name: request.Name()}, nil
}

// up gives the device its address and its peer's.
func (d *device) up(own, peer string) error {
	if err := run("ip", "address", "add", own, "peer", peer, "dev", d.name); err != nil {
		return err
	}
	// as long as a queue may get while the forwarder is kept from a CPU
	return run("ip", "link", "set", "dev", d.name, "txqueuelen", "10000", "up")
}
