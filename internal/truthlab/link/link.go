//go:build linux

package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Direction is a way over the link. The server is at the far end.
type Direction int

// The two ways.
const (
	ToServer Direction = iota
	ToClient
)

// Link joins the namespace it was made in with one of its own. Its methods may
// be called by any goroutine, at any time before Close.
type Link struct {
	Client, Server netip.Addr // addresses of the near and the far end

	ns      *namespace
	devices [2]*device // near, far
	wake    int        // eventfd: the link closes

	mu    sync.Mutex
	paths [2]path // by Direction

	done chan error // the forwarder has ended
}

// New makes a link without faults. It needs root.
func New() (*Link, error) {
	l := &Link{wake: -1, done: make(chan error, 1)}
	if err := l.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("emulated link: %w", err), l.release())
	}
	go func() { l.done <- l.forward() }()
	return l, nil
}

func (l *Link) open() (err error) {
	if l.ns, err = newNamespace(); err != nil {
		return err
	}
	if l.devices[0], err = newDevice("truthlab%d"); err != nil {
		return err
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(l.devices[0].name, "truthlab"), 10, 12)
	if err != nil {
		return fmt.Errorf("number of %s: %w", l.devices[0].name, err)
	}
	// 198.18.0.0/15 is set aside for tests of networks (RFC 2544)
	third, fourth := byte(n>>6), byte(n<<2)
	l.Client, l.Server = netip.AddrFrom4([4]byte{198, 18, third, fourth + 1}), netip.AddrFrom4([4]byte{198, 18, third, fourth + 2})
	if err := l.devices[0].up(l.Client.String(), l.Server.String()); err != nil {
		return err
	}
	err = l.ns.do(func() error {
		if l.devices[1], err = newDevice(far); err != nil {
			return err
		}
		if err := run("ip", "link", "set", "dev", "lo", "up"); err != nil {
			return err
		}
		return l.devices[1].up(l.Server.String(), l.Client.String())
	})
	if err != nil {
		return err
	}
	l.paths[ToServer].to, l.paths[ToClient].to = l.devices[1].fd, l.devices[0].fd
	l.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	return err
}

// far is the name of the device in the link's own namespace.
const far = "link0"

// Close ends the link: what is on the way is lost. The namespace goes when the
// last process in it does.
func (l *Link) Close() error {
	_, err := unix.Write(l.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	return errors.Join(err, <-l.done, l.release())
}

func (l *Link) release() error {
	var errs []error
	for _, d := range l.devices {
		if d != nil {
			errs = append(errs, unix.Close(d.fd))
		}
	}
	if l.wake >= 0 {
		errs = append(errs, unix.Close(l.wake))
	}
	if l.ns != nil {
		errs = append(errs, l.ns.file.Close())
	}
	return errors.Join(errs...)
}

// NetNS is the number of the server's namespace, as in /proc/PID/ns/net.
func (l *Link) NetNS() (uint32, error) { return l.ns.inode() }

// Do calls f on a thread in the server's namespace. What f opens or starts
// stays there; goroutines that it starts do not run there.
func (l *Link) Do(f func() error) error { return l.ns.do(f) }

// Enter gives the command line that runs a program in the server's namespace:
// nsenter, of util-linux, which becomes the program.
func (l *Link) Enter(path string, args ...string) []string {
	return append([]string{"nsenter", fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), l.ns.file.Fd()), path}, args...)
}

// Listen opens a listener at the far end, on a port that is free there.
func (l *Link) Listen() (listener net.Listener, err error) {
	err = l.Do(func() error {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(l.Server, 0).String())
		return err
	})
	return listener, err
}

// Sysctl sets a value of the server's namespace, such as net/ipv4/tcp_rmem.
func (l *Link) Sysctl(name, value string) error {
	return l.Do(func() error { return os.WriteFile("/proc/sys/"+name, []byte(value), 0) })
}

// Set changes a direction from here on. Packets on the way keep the time at
// which they were to arrive.
func (l *Link) Set(d Direction, p Path) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.paths[d].Path = p
	l.paths[d].sent = time.Time{}
}

// Drop drops the next n TCP segments whose data contain text, of those that
// no earlier Drop waits for.
func (l *Link) Drop(d Direction, text string, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.paths[d].drops = append(l.paths[d].drops, drop{text: []byte(text), n: n})
}

// Occupy puts so many bytes of somebody else's before the narrow place of a
// direction: what follows waits until Path.Rate has carried them.
func (l *Link) Occupy(d Direction, bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.paths[d].occupy(bytes, time.Now())
}

// Left tells when the latest data that were sent to a TCP port in a direction had left their
// sender's host; the zero time if none were. It is known for ports of the link's life.
func (l *Link) Left(d Direction, port uint16) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.paths[d].data[port]
}

// Stats of a direction so far.
func (l *Link) Stats(d Direction) Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.paths[d].stats
}

// Shape puts the kernel's token bucket on the server's device: rate in bits per
// second, burst and the buffer before it in bytes. Its queue is the server
// host's own, unlike that of Path.Rate, which lies beyond the device.
func (l *Link) Shape(rate int64, burst, buffer int) error {
	return l.Do(func() error {
		return run("tc", "qdisc", "replace", "dev", far, "root", "tbf", "rate", strconv.FormatInt(rate, 10)+"bit",
			"burst", strconv.Itoa(burst), "limit", strconv.Itoa(buffer))
	})
}

// Steer has the packets that come to the server's device handled on a CPU (RPS).
func (l *Link) Steer(cpu int) error {
	const queue = "/sys/class/net/" + far + "/queues/rx-0/rps_cpus"
	return l.Do(func() error {
		// /sys shows the devices of the namespace that it was mounted in
		return run("unshare", "--mount", "sh", "-ec", fmt.Sprintf("mount -t sysfs sysfs /sys; echo %x > %s", 1<<cpu, queue))
	})
}

// Unshape undoes Shape. What waits in the bucket is lost.
func (l *Link) Unshape() error {
	return l.Do(func() error { return run("tc", "qdisc", "del", "dev", far, "root") })
}

const (
	maxPacket = 65536 // bytes
	batch     = 64    // packets read from a device at a time, so that both are served
)

// forward carries packets until the link is closed. It has a thread of its own,
// before which others stand back, and sleeps in ppoll: the runtime's timers tick
// by the millisecond.
func (l *Link) forward() error {
	runtime.LockOSThread() // never unlocked: what urgent does ends with the thread
	if err := urgent(); err != nil {
		return err
	}
	fds := []unix.PollFd{{Fd: int32(l.wake), Events: unix.POLLIN}}
	for _, d := range l.devices {
		fds = append(fds, unix.PollFd{Fd: int32(d.fd), Events: unix.POLLIN})
	}
	buffer := make([]byte, maxPacket)
	for {
		timeout, err := l.step(buffer)
		if err != nil {
			return err
		}
		var until *unix.Timespec
		if timeout >= 0 {
			t := unix.NsecToTimespec(timeout.Nanoseconds())
			until = &t
		}
		if _, err := unix.Ppoll(fds, until, nil); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("emulated link: ppoll: %w", err)
		}
		if fds[0].Revents != 0 {
			return nil
		}
	}
}

// step takes what was sent, delivers what is due and tells how long there is
// nothing to do: negative if for ever.
func (l *Link) step(buffer []byte) (time.Duration, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, d := range l.devices {
		for range batch {
			n, err := unix.Read(d.fd, buffer)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				return 0, fmt.Errorf("emulated link: %s: %w", d.name, err)
			}
			l.paths[i].take(buffer[:n], time.Now())
		}
	}
	now, timeout := time.Now(), time.Duration(-1)
	for i := range l.paths {
		p := &l.paths[i]
		p.deliver(now)
		if t, ok := p.next(now); ok && (timeout < 0 || t < timeout) {
			timeout = t
		}
	}
	return timeout, nil
}

// urgent makes the present thread run as soon as it can, and its sleeps end when
// they should.
func urgent() error {
	attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 2}
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		// a cgroup without real-time runtime refuses it
		if nice := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20); nice != nil {
			return fmt.Errorf("emulated link: priority of the forwarder: %w", errors.Join(err, nice))
		}
	}
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("emulated link: timer slack: %w", err)
	}
	return nil
}
