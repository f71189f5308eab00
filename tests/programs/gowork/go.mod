module example.invalid/gowork

go 1.19
