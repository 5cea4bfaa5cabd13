// Program gtls says whether g is at the given offset from the FS base.
package main

import (
	"fmt"
	"os"
	"strconv"

	"github.com/ebpfllm/ebpfllm/internal/target/testdata/gtls/g"
)

func main() {
	offset, err := strconv.ParseInt(os.Args[1], 10, 64)
	if err != nil {
		panic(err)
	}
	fmt.Print(touch() && g.At(offset) == g.Current())
}
