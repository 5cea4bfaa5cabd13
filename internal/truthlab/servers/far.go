//go:build linux

package servers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/link"
)

// Far is a place at the far end of an emulated link, where a server runs that is
// asked over the link. One Far is for one scenario.
type Far struct {
	Link *link.Link // once the server has been started
}

// farPort is the server's; its namespace has no other servers but its own upstream.
const farPort, upstreamPort = "8080", "8081"

// open makes the link.
func (f *Far) open(rig *lab.Rig) (err error) {
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return lab.Unavailable("needs a kernel with TUN devices (modprobe tun): %v", err)
	}
	if f.Link, err = link.New(); err != nil {
		return err
	}
	rig.Cleanup(f.Link.Close)
	rig.Addr = net.JoinHostPort(f.Link.Server.String(), farPort)
	return nil
}

// An Upstream is where the server that a server asks is.
type Upstream int

// The places of an upstream.
const (
	None     Upstream = iota
	Stranger          // beside the server, but not of the service that is watched
	Own               // beside the server, and watched like it
	Near              // at the link's near end
)

// Threads is a C server with a thread per connection; what its paths do is in
// src/network.c. Its upstream is the same program.
func (f *Far) Threads(at Upstream) lab.Server {
	return lab.Server{Name: "threads", Start: func(ctx context.Context, rig *lab.Rig) error {
		program, err := buildC(ctx, "network.c")
		if err != nil {
			return err
		}
		data, err := makeData(rig)
		if err != nil {
			return err
		}
		if err := f.open(rig); err != nil {
			return err
		}
		arguments := []string{data, f.Link.Server.String(), farPort}
		var upstream []int
		switch at {
		case None:
		case Near:
			near := f.Link.Client.String()
			arguments = append(arguments, near, upstreamPort)
			if _, err := rig.SpawnOn(rig.Others, nil, program, data, near, upstreamPort); err != nil {
				return err
			}
		case Stranger, Own:
			const loopback = "127.0.0.1"
			arguments = append(arguments, loopback, upstreamPort)
			line := f.Link.Enter(program, data, loopback, upstreamPort)
			p, err := rig.Spawn(nil, line[0], line[1:]...)
			if err != nil {
				return err
			}
			if at == Own {
				upstream = []int{p.PID()}
			}
		}
		line := f.Link.Enter(program, arguments...)
		p, err := rig.Spawn(nil, line[0], line[1:]...)
		if err != nil {
			return err
		}
		if at != None {
			if err := p.WaitFor(ctx, "ready", func() bool { return rig.Ask(ctx, "/ask/") == nil }); err != nil {
				return err
			}
		}
		rig.PIDs = append([]int{p.PID()}, upstream...)
		return rig.WaitUntilUp(ctx, p, lab.Patience)
	}}
}

// Gateway is an aiohttp application; what its paths do is in src/gateway.py. Its
// upstream speaks plain HTTP and TLS, and is beside it or near. The names that
// the gateway resolves are the upstream's; of those that begin with "slow" the
// name server thinks for rig.Length.
func (f *Far) Gateway(at Upstream) lab.Server {
	return lab.Server{Name: "aiohttp", Start: func(ctx context.Context, rig *lab.Rig) error {
		python, err := findPython(ctx, "import aiohttp")
		if err != nil {
			return lab.Unavailable("needs aiohttp: apt-get install python3-aiohttp (%v)", err)
		}
		src, err := unpack(rig)
		if err != nil {
			return err
		}
		if err := f.open(rig); err != nil {
			return err
		}
		listen := f.Link.Listen
		address := f.Link.Server
		if at == Near {
			address = f.Link.Client
			listen = func() (net.Listener, error) { return net.Listen("tcp", net.JoinHostPort(address.String(), "0")) }
		}
		plain, err := serveUpstream(rig, listen, false)
		if err != nil {
			return err
		}
		secure, err := serveUpstream(rig, listen, true)
		if err != nil {
			return err
		}
		if err := f.serveNames(rig, address.As4()); err != nil {
			return err
		}
		resolver := filepath.Join(rig.Dir, "resolv.conf")
		if err := os.WriteFile(resolver, []byte("nameserver 127.0.0.1\n"), 0o644); err != nil { //nolint:gosec // anybody may read it
			return err
		}
		// its own mounts, so that it has its own name server
		line := f.Link.Enter("unshare", "--mount", "sh", "-c", `mount --bind "$0" /etc/resolv.conf && exec "$@"`, resolver,
			python, src+"/gateway.py", f.Link.Server.String(), farPort, address.String(), strconv.Itoa(plain), strconv.Itoa(secure))
		p, err := rig.Spawn(nil, line[0], line[1:]...)
		if err != nil {
			return err
		}
		rig.PIDs = []int{p.PID()}
		return rig.WaitUntilUp(ctx, p, lab.Patience)
	}}
}

// serveUpstream answers /sleep?MS after that, and all else at once. It returns its port.
func serveUpstream(rig *lab.Rig, listen func() (net.Listener, error), secure bool) (int, error) {
	listener, err := listen()
	if err != nil {
		return 0, err
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/sleep" {
			ms, err := strconv.Atoi(r.URL.RawQuery)
			if err != nil || ms < 0 {
				http.Error(w, "sleep for how many milliseconds?", http.StatusBadRequest)
				return
			}
			<-time.After(time.Duration(ms) * time.Millisecond)
		}
		w.Write([]byte("ok"))
	}))
	_ = s.Listener.Close()
	s.Listener = listener
	if secure {
		s.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
		s.StartTLS()
	} else {
		s.Start()
	}
	rig.Cleanup(func() error { s.Close(); return nil })
	return listener.Addr().(*net.TCPAddr).Port, nil
}

// serveNames is the name server at the far end.
func (f *Far) serveNames(rig *lab.Rig, address [4]byte) error {
	var server net.PacketConn
	err := f.Link.Do(func() (err error) {
		server, err = net.ListenPacket("udp4", "127.0.0.1:53") //nolint:noctx // does not wait
		return err
	})
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		buffer := make([]byte, 512)
		for {
			n, from, err := server.ReadFrom(buffer)
			if err != nil {
				done <- err
				return
			}
			question := append([]byte(nil), buffer[:n]...)
			go func() {
				reply, slow, err := resolve(question, address)
				if err != nil {
					rig.Logf("name server: %v", err)
					return
				}
				if slow {
					<-time.After(rig.Length)
				}
				_, _ = server.WriteTo(reply, from) // it may be closed by now
			}()
		}
	}()
	rig.Cleanup(func() error {
		err := server.Close()
		if ended := <-done; !errors.Is(ended, net.ErrClosed) {
			err = errors.Join(err, ended)
		}
		return err
	})
	return nil
}

// resolve answers a question for a name: every name has the one address.
func resolve(question []byte, address [4]byte) (reply []byte, slow bool, err error) {
	var p dnsmessage.Parser
	header, err := p.Start(question)
	if err != nil {
		return nil, false, err
	}
	q, err := p.Question()
	if err != nil {
		return nil, false, err
	}
	header.Response, header.RecursionAvailable = true, true
	m := dnsmessage.Message{Header: header, Questions: []dnsmessage.Question{q}}
	if q.Type == dnsmessage.TypeA {
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class},
			Body:   &dnsmessage.AResource{A: address},
		}}
	}
	reply, err = m.Pack()
	name := q.Name.String()
	return reply, len(name) >= 4 && name[:4] == "slow", err
}

// Burst is traffic of somebody else's from the far end to the near one.
type Burst struct {
	conn net.Conn
	sink net.PacketConn
}

// NewBurst makes its sockets.
func (f *Far) NewBurst(rig *lab.Rig) (*Burst, error) {
	sink, err := net.ListenPacket("udp4", net.JoinHostPort(f.Link.Client.String(), "0")) //nolint:noctx // does not wait
	if err != nil {
		return nil, err
	}
	b := &Burst{sink: sink}
	rig.Cleanup(sink.Close)
	err = f.Link.Do(func() (err error) {
		b.conn, err = net.Dial("udp4", sink.LocalAddr().String()) //nolint:noctx // does not wait
		return err
	})
	if err != nil {
		return nil, err
	}
	rig.Cleanup(b.conn.Close)
	// what a queue holds counts as the sender's
	raw, err := b.conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	const room = 64 << 20
	if e := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, room)
	}); e != nil {
		return nil, e
	}
	return b, err
}

// Send sends so many bytes at once, heads included.
func (b *Burst) Send(bytes int) error {
	const heads, mtu = 28, 1500
	packet := make([]byte, mtu-heads)
	for ; bytes > 0; bytes -= mtu {
		if _, err := b.conn.Write(packet[:max(0, min(bytes, mtu)-heads)]); err != nil {
			return fmt.Errorf("burst of packets: %w", err)
		}
	}
	return nil
}
