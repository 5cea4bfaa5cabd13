// Command goserver is the truth lab's server on net/http: a goroutine for each
// connection, on threads that Go's scheduler chooses.
//
//	GET /FAULT?N  the handler suffers the fault, and says in the header
//	              Fault-Nanoseconds how long it took
//
//	none          nothing           cpu?MS      computes
//	sleep?MS      waits for a timer flock?MS    waits for a file lock that another holds
//	mutex?MS      waits for a sync.Mutex that another goroutine holds
//	pipe?MS       writes to a full pipe that is emptied after MS
//	read?MIB      reads FILE, buffered by the kernel only
//	map?PAGES     touches pages of the mapped WEIGHTS, one here, one there
//	touch?MIB     touches fresh memory
//	gc?MS         garbage collections, one after the other
//	accept?MS     answers after MS, and until then the server accepts nobody
//	big?KIB       answers with so many KiB
//	upstream?URL  asks another server and answers when it has
//
// usage: goserver PORT FILE WEIGHTS
// It prints "ready PID".
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "goserver:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 4 {
		return errors.New("usage: goserver PORT FILE WEIGHTS")
	}
	f, err := newFaults(os.Args[2], os.Args[3])
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+os.Args[1])
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	held := &heldListener{TCPListener: listener.(*net.TCPListener)}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("ok")) })
	mux.HandleFunc("GET /big", func(w http.ResponseWriter, r *http.Request) { w.Write(make([]byte, number(r)<<10)) })
	mux.HandleFunc("GET /upstream", func(w http.ResponseWriter, r *http.Request) {
		answer, err := http.Get(r.URL.RawQuery)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer answer.Body.Close()
		_, _ = io.Copy(w, answer.Body) // whoever asked sees that it is short
	})
	faults := f.all()
	faults["accept"] = func(ms int64) error { return held.hold(milliseconds(ms)) }
	for name, suffer := range faults {
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, r *http.Request) {
			begin := time.Now()
			if err := suffer(number(r)); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Fault-Nanoseconds", strconv.FormatInt(time.Since(begin).Nanoseconds(), 10))
			w.Write([]byte("ok"))
		})
	}
	fmt.Println("ready", os.Getpid())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	return server.Serve(held)
}

func number(r *http.Request) int64 {
	n, _ := strconv.ParseInt(r.URL.RawQuery, 10, 64) // none is 0
	return n
}

func milliseconds(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// heldListener is one that can be kept from accepting.
type heldListener struct {
	*net.TCPListener
	held sync.Mutex
}

// hold keeps it for a while. Who accepts just now is called off.
func (l *heldListener) hold(d time.Duration) error {
	l.held.Lock()
	defer l.held.Unlock()
	if err := l.SetDeadline(time.Now()); err != nil {
		return err
	}
	time.Sleep(d)
	return l.SetDeadline(time.Time{})
}

func (l *heldListener) Accept() (net.Conn, error) {
	for {
		c, err := l.TCPListener.Accept()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return c, err
		}
		l.held.Lock()   // released when it is over
		l.held.Unlock() //nolint:staticcheck // waiting for it was the point
	}
}

type faults struct {
	file    string
	weights []byte
	heap    [][]*int // what a collection has to look through
}

var sink atomic.Int64

func newFaults(file, weights string) (*faults, error) {
	w, err := os.Open(weights)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	info, err := w.Stat()
	if err != nil {
		return nil, err
	}
	f := &faults{file: file}
	f.weights, err = unix.Mmap(int(w.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", weights, err)
	}
	for range 1000 {
		row := make([]*int, 100)
		for i := range row {
			row[i] = new(int)
		}
		f.heap = append(f.heap, row)
	}
	return f, unix.Madvise(f.weights, unix.MADV_RANDOM)
}

func (f *faults) all() map[string]func(int64) error {
	return map[string]func(int64) error{
		"none": func(int64) error { return nil },
		"cpu": func(ms int64) error {
			for end := time.Now().Add(milliseconds(ms)); time.Now().Before(end); {
			}
			return nil
		},
		"sleep": func(ms int64) error { time.Sleep(milliseconds(ms)); return nil },
		"flock": f.flock, "mutex": mutex, "pipe": pipe, "read": f.read, "map": f.touchWeights, "touch": touch,
		"gc": func(ms int64) error {
			for end := time.Now().Add(milliseconds(ms)); time.Now().Before(end); {
				runtime.GC()
			}
			runtime.KeepAlive(f.heap)
			return nil
		},
	}
}

// flock waits for a lock of the file that another holds.
func (f *faults) flock(ms int64) error {
	lock := func() (*os.File, error) {
		file, err := os.Open(f.file)
		if err != nil {
			return nil, err
		}
		return file, unix.Flock(int(file.Fd()), unix.LOCK_EX)
	}
	other, err := lock()
	if err != nil {
		return err
	}
	time.AfterFunc(milliseconds(ms), func() { other.Close() }) // which unlocks it
	own, err := lock()
	if err != nil {
		return err
	}
	return own.Close()
}

func mutex(ms int64) error {
	var m sync.Mutex
	m.Lock()
	time.AfterFunc(milliseconds(ms), m.Unlock)
	m.Lock()
	m.Unlock() //nolint:staticcheck // waiting for it was the point
	return nil
}

// pipe writes to a pipe that is full and that Go's poller does not know, so that
// the thread waits.
func pipe(ms int64) error {
	const size = 1 << 16
	var ends [2]int
	if err := unix.Pipe(ends[:]); err != nil {
		return err
	}
	defer unix.Close(ends[0])
	defer unix.Close(ends[1])
	if _, err := unix.Write(ends[1], make([]byte, size)); err != nil {
		return err
	}
	emptied := make(chan error, 1)
	time.AfterFunc(milliseconds(ms), func() {
		_, err := unix.Read(ends[0], make([]byte, size))
		emptied <- err
	})
	if _, err := unix.Write(ends[1], []byte{1}); err != nil {
		return err
	}
	return <-emptied
}

func (f *faults) read(mib int64) error {
	file, err := os.Open(f.file)
	if err != nil {
		return err
	}
	defer file.Close()
	buffer := make([]byte, 1<<20)
	for range mib {
		if _, err := file.Read(buffer); err != nil {
			return err
		}
	}
	return nil
}

func (f *faults) touchWeights(pages int64) error {
	size := int64(os.Getpagesize())
	last := int64(len(f.weights)) / size
	var sum, at int64
	for range pages {
		sum += int64(f.weights[at*size])
		at = (at + 7919) % last // a prime stride: none twice, none in a row
	}
	sink.Add(sum)
	return nil
}

func touch(mib int64) error {
	memory, err := unix.Mmap(-1, 0, int(mib<<20), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	defer unix.Munmap(memory)
	if err := unix.Madvise(memory, unix.MADV_NOHUGEPAGE); err != nil {
		return err
	}
	for at := 0; at < len(memory); at += os.Getpagesize() {
		memory[at] = 1
	}
	return nil
}
