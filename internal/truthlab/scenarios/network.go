//go:build linux

package scenarios

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/disturb"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/link"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/servers"
)

// network are faults of the network, and of whoever is at its other end. Each has
// its server at the far end of a link of its own.
func network() []lab.Scenario {
	var all []lab.Scenario
	for _, scenario := range []func(*servers.Far) lab.Scenario{
		slowReader, smallWindow, nagle, shaped, lostAnswer, lostForAWhile, bloatedStream, slowUpload, lateSoftirq,
		ownUpstreamComputes, ownUpstreamFaults,
		strangeUpstreamSleeps, strangeUpstreamComputes, freshUpstreamConnection, exhaustedPool, slowNames,
		newConnection, lateReader, lostRequest, bloatedAnswer,
	} {
		s := scenario(&servers.Far{})
		s.Name = "network/" + s.Name + "/" + s.Server.Name
		all = append(all, s)
	}
	return all
}

// Where nothing happens on the server's host, no time is to be found.
func noTime(*lab.Sample, time.Duration) time.Duration { return 0 }

func slowReader(far *servers.Far) lab.Scenario {
	const length = 60 * time.Millisecond
	read := func(ctx context.Context, body io.Reader) error {
		if err := rest(ctx, length); err != nil {
			return err
		}
		_, err := io.Copy(io.Discard, body)
		return err
	}
	return lab.Scenario{
		Name: "send_buffer/slow-reader", Stage: "send_buffer", Server: far.Threads(servers.None), Length: length,
		What:   "the client does not read for 60 ms while an answer comes that does not fit its window: bytes that send took wait in the socket",
		Normal: lab.Ask{Path: "/big?16"}, Affected: lab.Ask{Path: "/big?256", Read: read},
		Load: lab.Load{Dial: receiveBuffer(64 << 10)},
	}
}

func smallWindow(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "send_buffer/small-window", Stage: "send_buffer", Server: far.Threads(servers.None),
		What:   "the client's receive window holds a fraction of the answer, and a round trip takes 16 ms: the rest waits in the socket for window after window",
		Normal: lab.Ask{Path: "/"}, Affected: lab.Ask{Path: "/big?16"},
		Load:  lab.Load{Dial: receiveBuffer(4 << 10)},
		Setup: delay(far, 8*time.Millisecond),
	}
}

func nagle(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "nagle", Stage: "send_buffer", Server: far.Threads(servers.None), Report: "pegainfer-project/pegainfer#23", Quick: true,
		What:   "head and body are written apart on a kept-alive connection without TCP_NODELAY: the body waits in the socket until the client's delayed ACK of the head, 40 ms",
		Normal: lab.Ask{Path: "/"}, Affected: lab.Ask{Path: "/two"},
		Load: lab.Load{Dial: delayedACKs},
	}
}

func shaped(far *servers.Far) lab.Scenario {
	const rate = 16e6
	var burst *servers.Burst
	return lab.Scenario{
		Name: "qdisc", Stage: "qdisc", Server: far.Threads(servers.None), Quick: true, Length: 60 * time.Millisecond,
		What: "another sender's burst fills the token bucket (tbf) of the server host's own device: answers queue behind it",
		Setup: func(_ context.Context, rig *lab.Rig) (err error) {
			if burst, err = far.NewBurst(rig); err != nil {
				return err
			}
			return far.Link.Shape(rate, 4<<10, 4<<20)
		},
		Inject: func(ctx context.Context, _ *lab.Rig, d time.Duration) error {
			return errors.Join(burst.Send(int(rate/8*d.Seconds())), rest(ctx, d))
		},
	}
}

func lostAnswer(far *servers.Far) lab.Scenario {
	const marker = "lost-answer"
	return lab.Scenario{
		Name: "retransmit/answer", Stage: "retransmit", Server: far.Threads(servers.None), Quick: true, Length: 200 * time.Millisecond,
		What:   "the answer's only segment is lost on the way: the kernel sends it again after its timeout of 200 ms",
		Normal: lab.Ask{Path: "/"}, Affected: lab.Ask{Path: "/marked?" + marker},
		Before: func(context.Context, *lab.Rig) error {
			far.Link.Drop(link.ToClient, marker, 1)
			return nil
		},
	}
}

func lostForAWhile(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "retransmit/outage", Stage: "retransmit", Server: far.Threads(servers.None), Length: 60 * time.Millisecond,
		What: "everything that the server sends is lost for 60 ms: its kernel sends it again, after 200 ms at the earliest",
		Inject: func(ctx context.Context, _ *lab.Rig, d time.Duration) error {
			far.Link.Set(link.ToClient, link.Path{Loss: 1})
			defer far.Link.Set(link.ToClient, link.Path{})
			return rest(ctx, d)
		},
	}
}

// bloatRate is that of the link whose buffer is too large, in bits per second.
const bloatRate = 200e6

// bloat gives the link a narrow place with a large buffer before it, and returns
// what fills the buffer.
func bloat(far *servers.Far) (setup func(context.Context, *lab.Rig) error, inject func(context.Context, *lab.Rig, time.Duration) error) {
	setup = func(context.Context, *lab.Rig) error {
		far.Link.Set(link.ToServer, link.Path{Delay: 2 * time.Millisecond})
		far.Link.Set(link.ToClient, link.Path{Delay: 2 * time.Millisecond, Rate: bloatRate, Buffer: 8 << 20})
		return errors.Join(
			// BBR sends little for 200 ms every ten seconds, of its own accord
			far.Link.Sysctl("net/ipv4/tcp_congestion_control", "reno"),
			// a probe after two round trips, as if something were lost
			far.Link.Sysctl("net/ipv4/tcp_early_retrans", "0"))
	}
	inject = func(ctx context.Context, _ *lab.Rig, d time.Duration) error {
		far.Link.Occupy(link.ToClient, int(bloatRate/8*d.Seconds()))
		return rest(ctx, d)
	}
	return setup, inject
}

func bloatedStream(far *servers.Far) lab.Scenario {
	setup, inject := bloat(far)
	return lab.Scenario{
		Name: "bufferbloat/long-answer", Stage: "send_buffer", Also: []string{"retransmit"}, Server: far.Threads(servers.None), Length: 60 * time.Millisecond,
		What:   "another sender fills the large buffer of a narrow place behind the server's device: the answer's acknowledgements are late, and what they would let go waits in the socket; the kernel may take the delay for loss, and send again",
		Normal: lab.Ask{Path: "/big?128"},
		// so little of the answer may be on the way that the rest must wait for acknowledgements
		Load:  lab.Load{Rate: 32, Dial: receiveBuffer(32 << 10)},
		Setup: setup, Inject: inject,
		// one whose last window is on the way when the buffer fills is delayed there alone
		Left: func(port uint16) time.Time { return far.Link.Left(link.ToClient, port) },
	}
}

func bloatedAnswer(far *servers.Far) lab.Scenario {
	setup, inject := bloat(far)
	return lab.Scenario{
		Name: "bufferbloat/short-answer", Stage: lab.Nothing, Control: true, Server: far.Threads(servers.None), Length: 60 * time.Millisecond,
		What:      "the same with an answer that is sent at once: it queues on the way",
		Invisible: "the answer has left the server's host when it is delayed, and nothing of it happens there",
		Setup:     setup, Inject: inject, Added: noTime,
	}
}

func slowUpload(far *servers.Far) lab.Scenario {
	const size, length = 64 << 10, 60 * time.Millisecond
	upload := func() io.Reader {
		return io.MultiReader(bytes.NewReader(make([]byte, size)), sleeper(length), bytes.NewReader(make([]byte, size)))
	}
	return lab.Scenario{
		Name: "request_body", Stage: "request_body", Server: far.Threads(servers.None), Length: length,
		What:   "the client pauses for 60 ms in the middle of its request's body",
		Normal: lab.Ask{Path: "/"}, Affected: lab.Ask{Method: http.MethodPost, Path: "/body", Body: upload, Length: 2 * size},
	}
}

func ownUpstreamComputes(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "upstream-of-the-service/cpu", Stage: "cpu", Server: far.Threads(servers.Own), Length: 60 * time.Millisecond,
		What:   "the server asks another process of the service, by TCP on the loopback, and that computes: its time is the request's",
		Normal: lab.Ask{Path: "/ask/"}, Affected: lab.Ask{Path: "/ask/cpu?60"},
	}
}

func ownUpstreamFaults(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "upstream-of-the-service/page_fault", Stage: "page_fault", Server: far.Threads(servers.Own), Length: 40 * time.Millisecond,
		What:   "the server asks another process of the service, by TCP on the loopback, and that touches pages which were evicted",
		Normal: lab.Ask{Path: "/ask/"}, Affected: lab.Ask{Path: "/ask/map?512"},
		Before: func(_ context.Context, rig *lab.Rig) error { return disturb.Evict(rig.Paths["weights"]) },
	}
}

func strangeUpstreamSleeps(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "upstream/sleep", Stage: "wait", Control: true, Server: far.Threads(servers.Stranger), Length: 60 * time.Millisecond,
		What:   "the server asks an upstream that is not watched, and that takes 60 ms longer",
		Normal: lab.Ask{Path: "/ask/"}, Affected: lab.Ask{Path: "/ask/sleep?60"},
	}
}

func strangeUpstreamComputes(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "upstream/cpu", Stage: "wait", Control: true, Server: far.Threads(servers.Stranger), Length: 60 * time.Millisecond,
		What:   "the same, and it computes on the server's CPU meanwhile",
		Normal: lab.Ask{Path: "/ask/"}, Affected: lab.Ask{Path: "/ask/cpu?60"},
	}
}

func freshUpstreamConnection(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "upstream/new-tls-connection", Stage: "wait", Control: true, Server: far.Gateway(servers.Near), Report: "RunanywhereAI/wally#80",
		What:   "a gateway makes a new TLS connection to its upstream for a request, and a round trip takes 20 ms",
		Normal: lab.Ask{Path: "/kept"}, Affected: lab.Ask{Path: "/fresh"}, Load: lab.Load{Rate: 100, Every: 10},
		Setup: delay(far, 10*time.Millisecond),
	}
}

func exhaustedPool(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "upstream/pool-exhausted", Stage: "wait", Control: true, Server: far.Gateway(servers.Stranger), Report: "BerriAI/litellm#14895", Length: 60 * time.Millisecond,
		What:   "both connections of the gateway's pool are in use for 60 ms: requests queue for them in the application",
		Normal: lab.Ask{Path: "/pool?ms=0"}, Load: lab.Load{Rate: 100},
		Inject: func(ctx context.Context, rig *lab.Rig, d time.Duration) error {
			path := fmt.Sprintf("/pool?ms=%d", d.Milliseconds())
			var wg sync.WaitGroup
			var errs [2]error
			for i := range errs {
				wg.Go(func() { errs[i] = rig.Ask(ctx, path) })
			}
			wg.Wait()
			return errors.Join(errs[:]...)
		},
	}
}

func slowNames(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "upstream/name-server", Stage: "wait", Control: true, Server: far.Gateway(servers.Stranger), Report: "open-webui/open-webui#27440", Length: 60 * time.Millisecond,
		What:   "both threads that resolve names wait for a slow name server for 60 ms: requests queue for them in the application",
		Normal: lab.Ask{Path: "/resolve"}, Load: lab.Load{Rate: 100},
		Inject: func(ctx context.Context, rig *lab.Rig, _ time.Duration) error { return rig.Ask(ctx, "/resolve?n=2") },
	}
}

func newConnection(far *servers.Far) lab.Scenario {
	return lab.Scenario{
		Name: "new-connection", Stage: lab.Nothing, Control: true, Server: far.Threads(servers.None),
		What:   "the client connects anew for a request, and a round trip takes 40 ms: the handshake is over before the request is there",
		Normal: lab.Ask{Path: "/"}, Affected: lab.Ask{Path: "/", NewConn: true},
		Setup: delay(far, 20*time.Millisecond), Added: noTime,
	}
}

func lateReader(far *servers.Far) lab.Scenario {
	const length = 60 * time.Millisecond
	return lab.Scenario{
		Name: "late-client", Stage: lab.Nothing, Control: true, Server: far.Threads(servers.None), Report: "llm-d/llm-d-benchmark#261", Length: length,
		What:   "the client looks at an answer 60 ms after it has come, and counts that as the server's",
		Normal: lab.Ask{Path: "/"},
		Affected: lab.Ask{Path: "/", Read: func(ctx context.Context, body io.Reader) error {
			if err := rest(ctx, length); err != nil {
				return err
			}
			_, err := io.Copy(io.Discard, body)
			return err
		}},
		Added: noTime,
	}
}

func lostRequest(far *servers.Far) lab.Scenario {
	const marker = "lost-request"
	return lab.Scenario{
		Name: "lost-request", Stage: lab.Nothing, Control: true, Server: far.Threads(servers.None), Length: 200 * time.Millisecond,
		What:      "the request is lost on the way, and the client's kernel sends it again after 200 ms",
		Invisible: "the request is at the server's host only when the delay is over, and nothing of it happens there",
		Normal:    lab.Ask{Path: "/"}, Affected: lab.Ask{Path: "/?" + marker},
		Before: func(context.Context, *lab.Rig) error {
			far.Link.Drop(link.ToServer, marker, 1)
			return nil
		},
		Added: noTime,
	}
}

func lateSoftirq(far *servers.Far) lab.Scenario {
	var hog *disturb.SoftirqHog
	return lab.Scenario{
		Name: "softirq", Stage: lab.Nothing, Control: true, Evidence: lab.SoftirqDelay, Server: far.Threads(servers.None), Length: 60 * time.Millisecond,
		What: "softirqs are kept from the CPU that handles the server's packets: the one that brings the request runs late, before the request begins",
		// one at a time: the softirq is as late for all that it brings, and raised by the first of them
		Load: lab.Load{Connections: 1, Rate: 50},
		Setup: func(_ context.Context, rig *lab.Rig) (err error) {
			if err := far.Link.Steer(rig.CPU); err != nil {
				return lab.Unavailable("needs a kernel with CONFIG_RPS: %v", err)
			}
			if hog, err = disturb.NewSoftirqHog(rig.CPU, rig.Length); err == nil {
				rig.Cleanup(hog.Close)
			}
			return err
		},
		Inject: func(context.Context, *lab.Rig, time.Duration) error { return hog.Hold(nil) },
		Added:  longer,
	}
}

// rest waits.
func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// sleeper is an empty reader that takes its time.
type sleeper time.Duration

func (s sleeper) Read([]byte) (int, error) {
	<-time.After(time.Duration(s))
	return 0, io.EOF
}

// delay makes both ways of the link take so long.
func delay(far *servers.Far, d time.Duration) func(context.Context, *lab.Rig) error {
	return func(context.Context, *lab.Rig) error {
		far.Link.Set(link.ToServer, link.Path{Delay: d})
		far.Link.Set(link.ToClient, link.Path{Delay: d})
		return nil
	}
}

// receiveBuffer connects with a receive buffer of a fixed size, in bytes: without,
// the kernel enlarges it until the answer fits.
func receiveBuffer(size int) func(context.Context, *lab.Rig) (net.Conn, error) {
	return func(ctx context.Context, rig *lab.Rig) (net.Conn, error) {
		d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, size) }); e != nil {
				return e
			}
			return err
		}}
		return d.DialContext(ctx, "tcp", rig.Addr)
	}
}

// delayedACKs connects and asks until the client's kernel delays its ACKs: it sends
// the first ones of a connection at once.
func delayedACKs(ctx context.Context, rig *lab.Rig) (conn net.Conn, err error) {
	if conn, err = rig.Dial(ctx); err != nil {
		return nil, err
	}
	const tries, least = 100, 30 * time.Millisecond
	in := make([]byte, 4096)
	for range tries {
		begin := time.Now()
		if _, err := conn.Write([]byte("GET /two HTTP/1.1\r\nHost: server\r\n\r\n")); err != nil {
			return nil, err
		}
		for all := []byte(nil); !bytes.HasSuffix(all, []byte("\r\n\r\n\x00\x00")); {
			n, err := conn.Read(in)
			if err != nil {
				return nil, err
			}
			all = append(all, in[:n]...)
		}
		if time.Since(begin) > least {
			return conn, nil
		}
	}
	return nil, lab.Unavailable("this kernel does not delay its ACKs: none of %d answers took %v", tries, least)
}
