package lab

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// How a server says, in nanoseconds, how long the delay itself took, and how long the
// thread that answered was kept waiting for a CPU, by the scheduler's statistics.
const (
	faultHeader  = "Fault-Nanoseconds"
	queuedHeader = "Queued-Nanoseconds"
)

// load is steady load on a server, and what came of it.
type load struct {
	rig      *Rig
	scenario *Scenario
	faulty   bool // some requests ask for the fault

	count atomic.Int64 // requests begun

	mu      sync.Mutex
	samples []*Sample
}

// run asks until the context ends, and returns when the last answer is there. An
// error of any request ends the load.
func (l *load) run(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	n := l.scenario.Load.Connections
	interval := time.Duration(float64(n) / l.scenario.Load.Rate * float64(time.Second))
	start := time.Now()
	for i := range n {
		wg.Go(func() {
			if err := l.connection(ctx, i, start.Add(interval*time.Duration(i)/time.Duration(n)), interval); err != nil {
				stop(err)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != context.Canceled { //nolint:errorlint // that very value is what the caller's cancelling leaves
		return err
	}
	return nil
}

// connection sends requests on one kept-alive connection at fixed times.
func (l *load) connection(ctx context.Context, number int, next time.Time, interval time.Duration) error {
	var port atomic.Uint32 // of this end of the connection
	transport := &http.Transport{
		MaxIdleConnsPerHost: 1,
		DisableCompression:  true,
		DialContext: func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
			if l.scenario.Load.Dial != nil {
				conn, err = l.scenario.Load.Dial(ctx, l.rig)
			} else {
				conn, err = l.rig.Dial(ctx)
			}
			if err != nil {
				return nil, err
			}
			if local, ok := conn.LocalAddr().(*net.TCPAddr); ok {
				port.Store(uint32(local.Port))
			}
			return conn, nil
		},
	}
	defer transport.CloseIdleConnections()
	timer := time.NewTimer(time.Until(next))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		asked := l.faulty && l.scenario.Inject == nil && l.count.Add(1)%int64(l.scenario.Load.Every) == 0
		ask := &l.scenario.Normal
		var prepared time.Time
		if asked {
			ask = &l.scenario.Affected
			if l.scenario.Before != nil {
				prepared = time.Now()
				if err := l.scenario.Before(ctx, l.rig); err != nil {
					return fmt.Errorf("before an affected request: %w", err)
				}
			}
		}
		// not cancelled with the load: a request that has begun shall be whole
		s, err := send(context.WithoutCancel(ctx), transport, l.rig.Addr, ask)
		if err != nil {
			return err
		}
		s.Asked, s.Prepared, s.conn = asked, prepared, number
		if l.scenario.Left != nil {
			s.Left = l.scenario.Left(uint16(port.Load()))
		}
		l.mu.Lock()
		l.samples = append(l.samples, s)
		l.mu.Unlock()
		if next = next.Add(interval); time.Now().After(next) {
			next = time.Now()
		}
		timer.Reset(time.Until(next))
	}
}

// taken returns the requests that are over.
func (l *load) taken() []*Sample {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]*Sample(nil), l.samples...)
}

// requestTimeout bounds one request; a fault that takes longer is a mistake.
const requestTimeout = 30 * time.Second

// send makes one request with a trace of its own.
func send(ctx context.Context, transport *http.Transport, addr string, ask *Ask) (*Sample, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout, fmt.Errorf("no whole answer within %v", requestTimeout))
	defer cancel()
	method, path := ask.Method, ask.Path
	if method == "" {
		method = http.MethodGet
	}
	if path == "" {
		path = "/"
	}
	body := io.Reader(http.NoBody)
	if ask.Body != nil {
		body = ask.Body()
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, body)
	if err != nil {
		return nil, err
	}
	if ask.Body != nil {
		req.ContentLength = ask.Length
	}
	req.Close = ask.NewConn
	s := &Sample{}
	_, _ = rand.Read(s.Trace[:]) // never fails, see crypto/rand
	_, _ = rand.Read(s.Span[:])
	for k, v := range ask.Header {
		req.Header.Set(k, v)
	}
	req.Header.Set("Traceparent", fmt.Sprintf("00-%s-%s-01", s.Trace, s.Span))
	if ask.NewConn {
		transport.CloseIdleConnections()
	}
	s.Start = time.Now()
	res, err := transport.RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer res.Body.Close()
	if ask.Read != nil {
		err = ask.Read(ctx, res.Body)
	} else {
		_, err = io.Copy(io.Discard, res.Body)
	}
	if err != nil {
		return nil, fmt.Errorf("answer to %s %s: %w", method, path, err)
	}
	s.End = time.Now()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s %s: %s", method, path, res.Status)
	}
	for name, d := range map[string]*time.Duration{faultHeader: &s.Fault, queuedHeader: &s.Queued} {
		v := res.Header.Get(name)
		if v == "" {
			continue
		}
		ns, err := strconv.ParseInt(v, 10, 64)
		s.Account = s.Account || name == queuedHeader
		if err != nil || ns < 0 {
			return nil, fmt.Errorf("answer to %s %s: header %s is %q, not a number of nanoseconds", method, path, name, v)
		}
		*d = time.Duration(ns)
	}
	return s, nil
}
