//go:build linux && amd64

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"
)

// order is what a client is told.
type order struct {
	Addr   string        `json:"addr"`
	Rate   float64       `json:"rate"`   // requests per second
	Chunks int           `json:"chunks"` // of each answer; 0: it is whole
	Mixed  bool          `json:"mixed"`  // all kinds of requests, not one
	Length time.Duration `json:"length"`
}

// asked is what it did.
type asked struct {
	Answered int           `json:"answered"`
	P50      time.Duration `json:"p50"` // from the time at which the request was due
	P99      time.Duration `json:"p99"`
}

// connections of a client at one time.
const connections = 64

// runClient keeps to a schedule that does not wait for answers: a request that is
// late because the one before it on its connection took long is put at once, and
// its latency counts from when it was due.
func runClient(told string) error {
	var o order
	if err := json.Unmarshal([]byte(told), &o); err != nil {
		return err
	}
	var (
		all       asked
		latencies []time.Duration
		mu        sync.Mutex
		wg        sync.WaitGroup
		errs      = make(chan error, connections)
	)
	interval := time.Duration(connections * float64(time.Second) / o.Rate)
	begin := time.Now()
	for i := range connections {
		wg.Go(func() {
			c := &conn{addr: o.Addr, random: rand.New(rand.NewPCG(1, uint64(i)))}
			defer c.close()
			due := begin.Add(time.Duration(i) * interval / connections)
			var own []time.Duration
			for ; due.Before(begin.Add(o.Length)); due = due.Add(interval) {
				time.Sleep(time.Until(due))
				answered, err := c.ask(o)
				if err != nil {
					errs <- err
					return
				}
				if answered {
					own = append(own, time.Since(due))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			latencies = append(latencies, own...)
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
	}
	slices.Sort(latencies)
	all.Answered = len(latencies)
	if n := len(latencies); n > 0 {
		all.P50, all.P99 = latencies[n/2], latencies[n*99/100]
	}
	return json.NewEncoder(os.Stdout).Encode(all)
}

// conn is a kept connection.
type conn struct {
	addr   string
	random *rand.Rand
	net.Conn
	in *bufio.Reader
}

func (c *conn) close() {
	if c.Conn != nil {
		_ = c.Close()
		c.Conn = nil
	}
}

func (c *conn) dial() (err error) {
	if c.Conn == nil {
		c.Conn, err = net.Dial("tcp4", c.addr)
		c.in = bufio.NewReader(c.Conn)
	}
	return err
}

// ask puts one request, and tells whether it was one that is answered.
func (c *conn) ask(o order) (bool, error) {
	if !o.Mixed {
		return true, c.whole(fmt.Sprintf("/v1/chat/completions?%d", o.Chunks))
	}
	switch n := c.random.IntN(100); {
	case n < 50:
		return true, c.whole("/v1/chat/completions")
	case n < 70:
		return true, c.whole("/v1/chat/completions?10")
	case n < 80: // a connection of its own
		c.close()
		defer c.close()
		return true, c.whole("/v1/chat/completions")
	case n < 84:
		return true, c.whole("/lock")
	case n < 86:
		return true, c.whole("/spawn")
	case n < 89: // goes away in the midst of its answer
		defer c.close()
		err := errors.Join(c.dial(), c.put("/v1/chat/completions?10"))
		if err != nil {
			return false, err
		}
		_, err = c.in.ReadByte()
		return false, err
	case n < 92: // goes away in the midst of its head
		defer c.close()
		return false, errors.Join(c.dial(), c.write("POST /v1/chat/completions HTTP/1.1\r\nHost:"))
	case n < 95: // no HTTP
		defer c.close()
		return false, errors.Join(c.dial(), c.write("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), c.drain())
	case n < 97: // two at once
		defer c.close()
		return false, errors.Join(c.dial(), c.put("/v1/chat/completions"), c.put("/v1/chat/completions"), c.answer(), c.answer())
	default: // a body that comes slowly
		if err := errors.Join(c.dial(), c.write("POST /v1/chat/completions HTTP/1.1\r\nHost: server\r\nContent-Length: 4\r\n\r\n")); err != nil {
			return false, err
		}
		for range 4 {
			time.Sleep(2 * time.Millisecond)
			if err := c.write("x"); err != nil {
				return false, err
			}
		}
		return true, c.answer()
	}
}

// whole puts a request and reads all of its answer.
func (c *conn) whole(path string) error {
	return errors.Join(c.dial(), c.put(path), c.answer())
}

// put sends a request that carries a trace context of its own.
func (c *conn) put(path string) error {
	return c.write(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"+
		"traceparent: 00-%016x%016x-%016x-01\r\nContent-Length: 2\r\n\r\n{}", path, c.random.Uint64(), c.random.Uint64()|1, c.random.Uint64()|1))
}

func (c *conn) write(s string) error {
	if c.Conn == nil {
		return errors.New("no connection")
	}
	_, err := io.WriteString(c.Conn, s)
	return err
}

func (c *conn) answer() error {
	r, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	_, err = io.Copy(io.Discard, r.Body)
	return err
}

// drain reads until the server closes.
func (c *conn) drain() error {
	_, err := io.Copy(io.Discard, c.in)
	return err
}
